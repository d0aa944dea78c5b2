"""Companion sequences: what a second row of logits is computed from (classifier-free guidance).

A companion is a `Request` of its own that only its owner knows. It begins with the tokens that the
chain's `CompanionProcessor` names, and every token of the answer is appended to both. Both are
admitted, preempted and freed together, and decode in the same steps. In prefill the companion comes
first, and its row is kept until the owner's is known. The queues hold owners alone. What is drafted
for the owner is drafted for both, and rejected in both: a step keeps a row of the companion for
each of the owner's.

The draft model computes the companions of processors that need another model, in the same steps and
with pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from adapters.chain import ProcessorChain
from adapters.contract import CompanionProcessor
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.plan import Plan, Request
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

FIELD = "logits_processors"
"""Head of the path in errors about a companion."""


class CompanionRows(LogitsTap):
    """Rows of a companion that the newest step computed, those of drafted tokens among them: its
    `LogitsTap`, and the `SecondRow` of its owner's chain.

    Args:
        offset: Tokens that the owner's prompt has more than the companion's; may be negative.
    """

    wants_generated = True

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._first = -1
        self._rows = torch.empty(0)

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """Keep the row ``[V]`` for the companion's token at `position`, and no other."""
        self.keep(position, logits[None])

    def keep(self, position: int, logits: torch.Tensor) -> None:
        """Keep the rows ``[n, V]`` for the companion's tokens from `position` on, and no others."""
        self._first, self._rows = position + self._offset, logits.to("cpu", copy=True)

    def __call__(self, position: int) -> torch.Tensor:
        """The row ``[V]`` for the owner's token at `position`.

        Raises:
            LookupError: the rows are for others.
        """
        if not 0 <= position - self._first < len(self._rows):
            known = f"for {len(self._rows)} from {self._first} on"
            raise LookupError(f"there is no second row of logits for position {position}, but {known}")
        return self._rows[position - self._first]


def companion_of(
    request: Request, context_length: int, draft_model: DraftModel | None = None, *, answers: bool = True
) -> Request | None:
    """The companion that a request's chain needs, None if it needs none.

    The answer then ends where either sequence fills the context.

    Args:
        request: Request that is being admitted; its chain has begun after the prompt.
        context_length: Longest sequence, in tokens.
        draft_model: Draft model of the engine, None if it has none.
        answers: Whether the answer is generated here; a prefill worker is asked for one token of it
            and does not know its length.

    Raises:
        InvalidRequest: the companion does not fit into the context, its model is missing, or the
            chain needs a second companion, or has a processor whose state would have to be rebuilt
            from both rows, or one that counts on a longer answer; or its processor names no tokens.
    """
    chain = request.chain
    if chain is None or chain.companion is None:
        return None
    processor = chain.companion
    _check_beside(processor, chain)
    by_draft_model = processor.companion_model == "draft"
    if by_draft_model:
        if draft_model is None:
            problem = "needs a draft model, whose logits it reads: model of --speculative-config"
            raise InvalidRequest(FIELD, f"{processor.name} {problem}")
        context_length = min(context_length, draft_model.context_length)
        if draft_model.model.numerics != "exact":
            chain.receipt.numerics = draft_model.model.numerics
    begin, generated = _beginning(processor, chain), request.tokens[request.prompt_length :]
    if len(begin) + len(generated) >= context_length:
        what, whose = ("prompt", "draft model's context") if by_draft_model else ("negative prompt", "context")
        problem = f"the {what} must be shorter than the {whose} of {context_length} tokens, got {len(begin)}"
        raise InvalidRequest(FIELD, f"{processor.name}: {problem}" + _and_answer(len(generated)))
    offset = request.prompt_length - len(begin)
    request.limit = min(request.limit, context_length + offset)
    if answers:
        _check_counted(processor, chain, request.limit - request.prompt_length)
    processor.second_row = rows = CompanionRows(offset)
    return Request(
        id=request.id,
        number=request.number,
        params=SamplingParams(),
        tokens=[*begin, *generated],
        prompt_length=len(begin),
        limit=request.limit - offset,
        end_ids=frozenset(),
        seed=0,
        tap=rows,
        cache_salt=request.cache_salt,
        adapter=None if by_draft_model else request.adapter,  # an adapter is the target's
        client=request.client,
        speculates=False,
        is_companion=True,
        by_draft_model=by_draft_model,
    )


def _beginning(processor: CompanionProcessor, chain: ProcessorChain) -> list[int]:
    """The tokens that a companion begins with. Raises `InvalidRequest` if they are none."""
    vocab_size = chain.context.vocabulary.size
    try:
        begin = list(processor.companion_prompt)
    except BaseException as error:  # the processor boundary: third-party code
        member = next(one for one in chain.members if one.processor is processor)
        raise InvalidRequest(FIELD, str(chain.failures.raised(member, error))) from error
    if not begin or not all(type(token) is int and 0 <= token < vocab_size for token in begin):
        problem = f"{processor.name}: its companion must begin with token ids from 0 to {vocab_size - 1}"
        raise InvalidRequest(FIELD, problem)
    return begin


def _check_beside(processor: CompanionProcessor, chain: ProcessorChain) -> None:
    """Raises `InvalidRequest` if another member of its chain cannot be combined with it."""
    others = [member for member in chain.members if member.processor is not processor]
    second = [member.name for member in others if isinstance(member.processor, CompanionProcessor)]
    if second:
        problem = f"{processor.name} cannot be combined with {' and '.join(second)}: a request has one companion"
        raise InvalidRequest(FIELD, problem)
    stateful = [member.name for member in others if member.processor.observes_logits]
    if stateful:
        problem = f"{processor.name} cannot be combined with {' and '.join(stateful)}, which follows the logits of "
        raise InvalidRequest(FIELD, problem + "earlier positions: after a migration only one row of each is known")


def _check_counted(processor: CompanionProcessor, chain: ProcessorChain, most: int) -> None:
    """Raises `InvalidRequest` if a member counts down to more tokens than the answer can have."""
    counted = chain.context.max_tokens
    names = [member.name for member in chain.members if member.processor.counts_down]
    if names and counted is not None and most < counted:
        problem = f"counts on an answer of {counted} tokens, and beside {processor.name}, whose second sequence must "
        problem += f"fit into its context, it has at most {most}; lower max_tokens"
        raise InvalidRequest(FIELD, f"{names[0]} {problem}")


def _and_answer(num_generated: int) -> str:
    return f" and {num_generated} of the answer" if num_generated else ""


def share_row(chain: ProcessorChain | None, source: ProcessorChain | None) -> None:
    """Let a chain read the second row of `source`, a chain of the same request and history."""
    if chain is not None and source is not None and chain.companion is not None and source.companion is not None:
        chain.companion.second_row = source.companion.second_row


def check_room(request: Request, max_num_seqs: int, cache: KvCache, where: str = "") -> None:
    """Check that a request and its companion can ever run.

    Args:
        request: An admitted request.
        max_num_seqs: Rows of a batch at most.
        cache: The bookkeeping of the KV pages.
        where: Head of the field in errors.

    Raises:
        InvalidRequest: they take more batch rows or KV pages than there are.
    """
    companion = request.companion
    if companion is None:
        return
    assert request.chain is not None
    assert request.chain.companion is not None
    name = request.chain.companion.name
    if max_num_seqs < len(request.sequences):
        raise InvalidRequest(where + FIELD, f"{name} takes two rows of a batch, and --max-num-seqs is {max_num_seqs}")
    longest = cache.count_longest(request)
    if longest > cache.num_pages:
        blocks = cache.page_size // cache.block_size
        problem = f"{name} keeps the KV of two sequences, of {request.limit} and {companion.limit} tokens at most: "
        wanted = f"{longest * blocks} blocks, and --kv-blocks is {cache.num_pages * blocks}; lower max_tokens"
        raise InvalidRequest(where + FIELD, problem + wanted)


def take_rows(plan: Plan, logits: torch.Tensor, decoding: Sequence[Request]) -> tuple[Plan, torch.Tensor]:
    """Keep the rows of companions for their owners; the owners' part of a plan, and its logits.

    Args:
        plan: A step that computes companions.
        logits: Rows of it, as `Model.forward` returns them.
        decoding: The decoding requests: the result has this tuple if they are the step's.
    """
    kept: list[int] = []
    for request, (first, end) in zip(plan.sampled, pairwise([*plan.first_rows(), len(logits)]), strict=True):
        if request.is_companion:
            keep_rows(request, logits[first:end])
        else:
            kept += range(first, end)
    decode = _owners(plan.decode)
    if decode == decoding:
        decode = tuple(decoding)  # the tuple itself
    ended = _owners(plan.sampled[len(plan.decode) :])
    owners = replace(
        plan,
        decode=decode,
        chunks=tuple(chunk for chunk in plan.chunks if not chunk.request.is_companion),
        sampled=decode + ended if ended else decode,
        drafts=plan.drafts[: len(decode)],
        num_companions=0,
    )
    return owners, logits[kept]


def keep_rows(companion: Request, logits: torch.Tensor) -> None:
    """Keep the rows ``[n, V]`` that a step computed for a companion: for its next token, and for
    those behind drafted ones.
    """
    assert isinstance(companion.tap, CompanionRows), f"{companion.id} is no companion"
    companion.tap.keep(len(companion.tokens), logits)


def drafted_owners(plan: Plan, computed: Plan, spoiled: Sequence[Request]) -> list[Request]:
    """Owners in a plan of which a sequence with a draft is spoiled.

    Args:
        plan: A step.
        computed: The step, or the draft model's part of it.
        spoiled: Requests and companions of `computed` of which a token is not finite.
    """
    drafted = {id(one) for one, draft in zip(computed.decode, computed.drafts, strict=False) if draft}
    bad = {id(one) for one in spoiled} & drafted
    return [one for one in plan.decode if not one.is_companion and bad & {id(each) for each in one.sequences}]


def _owners(requests: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(request for request in requests if not request.is_companion)
