"""The decisions of a recorded answer: each made again, after the tokens that were recorded.

An answer that is made again with other logits may take another token, and has another text from
there on. Here every position has the recorded history, so that each decision stands by itself: what
the processors rule out does not depend on the last bits of logits, and what is chosen seldom does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.catalog import Requested, Selection
from adapters.chain import ProcessorChain, apply_plan
from adapters.contract import ArgumentError, Context
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.seeded_sampler import SeededSampler
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_members import other_members
from worker.engines.embedded.companions import share_row
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.plan import Request
from worker.errors import ConfigurationError
from worker.replay.recorded import RecordedReceipt
from worker.replay.run import LoadedModel, prepared, replay
from worker.requests.receipts import TokenDigest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import empty_chain, is_sampled, with_field_processors

MAX_SHOWN = 5
"""Decisions that are shown one by one."""

TOKEN_ID = "token_id:"
"""Beginning of a token in log probabilities with ``return_tokens_as_token_ids``."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One position of a recorded answer.

    Attributes:
        position: Absolute position, as in receipts.
        token_id: The token that was recorded.
        chosen: The token that is chosen here.
        ruled_out_by: Processor whose mask or forcing leaves other tokens alone, None without one.
    """

    position: int
    token_id: int
    chosen: int
    ruled_out_by: str | None


class DecisionTap(LogitsTap):
    """A `LogitsTap` that makes each decision of a request whose tokens are forced.

    Args:
        tokens: Recorded prompt and answer.
        chain: Chain of the recorded request with all fields in it; see `whole_chain`.
        never_ids: Ids that are never sampled.

    Attributes:
        decisions: Decisions so far.
    """

    wants_generated = True

    def __init__(self, tokens: Sequence[int], chain: ProcessorChain, never_ids: Sequence[int]) -> None:
        self._tokens = tokens
        self._chain = chain
        self._never = list(never_ids)
        self.decisions: list[Decision] = []

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """The row ``[V]`` from which the token at `position` is sampled."""
        if position != self._chain.position or position >= len(self._tokens):  # seen before, or after the answer
            return
        row, token_id, ruled_out_by = logits.to("cpu", torch.float32, copy=True), self._tokens[position], None
        row[self._never] = -torch.inf
        for member, plan in self._chain.plan_each():
            apply_plan(self._chain, plan, row, self._never)
            if ruled_out_by is None and not plan.permits(token_id):
                ruled_out_by = member.name
        self.decisions.append(Decision(position, token_id, int(row.argmax()), ruled_out_by))
        self._chain.accept(token_id, position)


def whole_chain(request: EngineRequest, vocabulary: Vocabulary, end_token_ids: Collection[int]) -> ProcessorChain:
    """The chain of a request with all of its fields, and the draw of one that is sampled.

    Args:
        request: A request with a seed, its processors prepared.
        vocabulary: Vocabulary of the model.
        end_token_ids: Ids that end the answer.

    Raises:
        InvalidRequest: a field cannot be honoured.
    """
    params, chain = request.params, request.chain
    random = is_sampled(params, chain)
    context = Context(vocabulary, frozenset(end_token_ids), request.seed, request.choice, max_tokens=params.max_tokens)
    prompt, extra = request.prompt_token_ids, other_members(params, 0, vocabulary.size)
    _, chain = with_field_processors(params, chain, prompt, context, extra, by_sampler=(), late=True)
    chain = chain or empty_chain(context, prompt)
    if random:
        chain.add([SeededSampler(request.seed, request.choice)], last=True)
    return chain


def read_answer(path: Path, receipt: RecordedReceipt, end_token_ids: Collection[int]) -> list[int]:
    """The answer's token ids, of the digest in the receipt.

    Args:
        path: A JSON list of token ids, or the response with them in its log probabilities
            (``return_tokens_as_token_ids``). An end token may be missing.
        receipt: Receipt of the answer.
        end_token_ids: Ids that end an answer.

    Raises:
        ConfigurationError: it cannot be read, or is another answer.
    """
    try:
        answers = _answers(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"--answer-file {path}: {error}") from None
    if not answers:
        wanted = "expected a JSON list of token ids, or a response with logprobs and return_tokens_as_token_ids"
        raise ConfigurationError(f"--answer-file {path}: {wanted}")
    for found in answers:
        for answer in (found, *([*found, end] for end in sorted(end_token_ids))):
            if str(TokenDigest(answer)) == receipt.answer_digest:
                return answer
    raise ConfigurationError(f"answer_digest: the receipt is of another answer than --answer-file {path}")


def _answers(data: Any) -> list[list[int]]:
    """The token ids of every answer in a file; none where it has none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    listed = [_shown_ids(each) for each in choices] if isinstance(choices, list) else [data]
    return [
        ids for ids in listed if isinstance(ids, list) and all(type(one) is int and 0 <= one < 2**31 for one in ids)
    ]


def _shown_ids(choice: Any) -> list[int] | None:
    """The token ids in the log probabilities of a choice, None if there are none."""
    try:
        texts = [each["token"] for each in choice["logprobs"]["content"]]
        return [int(text.removeprefix(TOKEN_ID)) for text in texts]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


async def decisions(
    model: LoadedModel,
    prompt: list[int],
    params: SamplingParams,
    selection: Selection,
    choice: int,
    answer: Sequence[int],
) -> list[Decision]:
    """Every decision of an answer, from the logits of this model.

    Raises:
        ConfigurationError: a processor takes tokens back, so that the answer is not its history, or
            fails here.
        InvalidRequest: the request cannot be served.
    """
    ends = params.ends_with(model.info.eos_token_ids)
    asked = await prepared(model.chains, model.info, "decisions", prompt, params, selection, choice)
    chain = whole_chain(asked, model.chains.vocabulary, ends)
    if chain.backtracks:
        raise ConfigurationError("--answer-file: the answer has a processor that takes tokens back; replay it without")
    guided = [one for one in selection.processors if chain.companion is not None and one.name == chain.companion.name]
    request = await _forced(model, prompt, answer, guided)
    share_row(chain, request.chain)
    request.tap = tap = DecisionTap([*prompt, *answer], chain, model.stepper.model.undecodable_ids)
    error = replay(model.stepper, request, len(answer)).error
    if error is not None and all(each.ruled_out_by is None for each in tap.decisions):  # else that is what is wrong
        raise ConfigurationError(
            f"--answer-file: the decision after {len(tap.decisions)} tokens cannot be made: {error}"
        )
    return tap.decisions


async def _forced(model: LoadedModel, prompt: list[int], answer: Sequence[int], beside: Sequence[Requested]) -> Request:
    """A request whose answer is the recorded one, with the processors `beside`.

    An answer may have more tokens than a list in a client's request.
    """
    params = SamplingParams(max_tokens=len(answer), ignore_eos=True, seed=0)
    request = await model.request("forced", prompt, params, Selection(tuple(beside)))
    context = Context(model.chains.vocabulary)
    request.chain = request.chain or empty_chain(context, prompt)
    try:
        forced = ForcedPrefix(ForcedPrefix.Args.model_construct(token_ids=list(answer)), context)
    except ArgumentError as error:
        raise ConfigurationError(f"--answer-file: {error.problem}") from None
    request.chain.add([forced])
    return request


def lines(found: Sequence[Decision], receipt: RecordedReceipt, tokenizer: Any) -> list[str]:
    """Lines on the decisions: how many hold, and the first of those that do not."""

    def shown(token_id: int) -> str:
        return f"{token_id} {tokenizer.decode([token_id])!r}"

    ruled_out = [each for each in found if each.ruled_out_by is not None]
    others = [each for each in found if each.ruled_out_by is None and each.chosen != each.token_id]
    again = len(found) - len(ruled_out) - len(others)
    head = (
        f"decisions: {len(found) - len(ruled_out)} of {receipt.generated_tokens} tokens are allowed by the processors"
    )
    told = [
        f"position {each.position}: {shown(each.token_id)} was taken, "
        + (f"here {shown(each.chosen)}" if each.ruled_out_by is None else f"RULED OUT by {each.ruled_out_by}")
        for each in [*ruled_out, *others][:MAX_SHOWN]
    ]
    return [f"{head}, {again} are chosen again", *told]


def hold(found: Sequence[Decision], receipt: RecordedReceipt) -> bool:
    """Whether every token was a decision that the processors allow."""
    return len(found) == receipt.generated_tokens and all(each.ruled_out_by is None for each in found)
