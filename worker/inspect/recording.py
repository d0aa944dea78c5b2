"""One answer, with what each of its processors did at every position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adapters.catalog import Selection
from worker.replay.position import MODEL, SAMPLER, Position, Stage, sampler
from worker.replay.run import LoadedModel, replay
from worker.requests.request import RequestLimits, parse_request
from worker.requests.sampling_defaults import SamplingDefaults
from worker.sampling import SamplingParams
from worker.sampling.field_processors import for_engine


@dataclass(frozen=True, slots=True)
class InspectedRequest:
    """A request to record.

    Attributes:
        name: Tells the recordings of one command apart.
        prompt: Token ids.
        params: Sampling controls, with a seed.
        selection: Selected processors.
        num_tokens: Longest answer, in tokens.
        choice: Index of the answer among several to one prompt.
        hidden_end_ids: See `EngineRequest.hidden_end_ids`.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    selection: Selection
    num_tokens: int
    choice: int = 0
    hidden_end_ids: Sequence[int] = ()

    def with_seed(self, name: str, seed: int) -> InspectedRequest:
        """The same request with another seed."""
        return replace(self, name=name, params=replace(self.params, seed=seed))


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer.

    Attributes:
        name: Name of the request.
        seed: Seed of its random numbers.
        sampler: Controls that are left to the sampler after the processors.
        processors: Names, in the order of the request.
        prompt_length: Tokens of the prompt.
        positions: Positions of the answer; the last one may have no token.
        token_ids: Tokens of the answer.
        texts: Text of every token in it and among its candidates, by id.
        error: Reason of its early end, if a processor failed.
    """

    name: str
    seed: int
    sampler: str
    processors: tuple[str, ...]
    prompt_length: int
    positions: list[Position]
    token_ids: list[int]
    texts: Mapping[int, str] = field(repr=False)
    error: str | None = None


def inspected_request(
    model: LoadedModel,
    prompt: list[int],
    sampling: Mapping[str, Any],
    processors: str,
    seed: int,
    num_tokens: int,
) -> InspectedRequest:
    """The request that a frontend would send.

    Args:
        model: Model that will answer.
        prompt: Token ids.
        sampling: Fields of a request's ``sampling_options``.
        processors: JSON, as the request channel takes it.
        seed: Seed of the random numbers.
        num_tokens: Value of ``max_tokens``.

    Raises:
        InvalidRequest: it would be refused.
    """
    info = model.info
    raw = {
        "token_ids": prompt,
        "sampling_options": dict(sampling),
        "stop_conditions": {"max_tokens": num_tokens},
        "annotations": ["logits_processors:" + processors],
    }
    request = parse_request(raw, RequestLimits(info.context_length, info.vocab_size, info.eos_token_ids))
    selection = model.chains.select(request, {})
    defaults = SamplingDefaults.load(model.arguments)
    filled, _ = defaults.fill(request.params, {one.name for one in selection.processors})
    params = for_engine(filled, seed=seed)
    return InspectedRequest("A", prompt, params, selection, num_tokens, selection.choice)


async def record(model: LoadedModel, inspected: InspectedRequest, num_candidates: int) -> Recording:
    """Decode the answer.

    Raises:
        InvalidRequest: it cannot be served.
    """
    asked = inspected.prompt, inspected.params, inspected.selection, inspected.choice, inspected.hidden_end_ids
    request, copy = [await model.request(f"inspect-{inspected.name}", *asked) for _ in range(2)]
    tap = model.tap(request, copy, num_candidates=num_candidates)
    replayed = replay(model.stepper, request, inspected.num_tokens, tap)
    assert inspected.params.seed is not None
    return Recording(
        inspected.name,
        inspected.params.seed,
        sampler(request.params),
        tuple(one.name for one in inspected.selection.processors),
        len(inspected.prompt),
        tap.positions,
        replayed.token_ids,
        _texts(tap.positions, lambda token_id: str(model.tokenizer.decode([token_id]))),
        replayed.error,
    )


def _texts(positions: list[Position], decode: Callable[[int], str]) -> dict[int, str]:
    ids = {one.token_id for each in positions for stage in each.stages for one in stage.candidates}
    ids |= {each.token_id for each in positions if each.token_id is not None}
    return {token_id: printable(decode(token_id)) for token_id in sorted(ids)}


def printable(text: str) -> str:
    """`text` with what a terminal or a page might obey or hide written as escapes."""
    return repr(text)[1:-1].replace("\\'", "'") if text else "(nothing)"


VERDICTS = {
    "kept": "the model's most likely token is the most likely one after the processors, too",
    "changed": "another token is the most likely one after them",
    "forced": "they left one token",
    "failed": "the request ended here without a token",
}
"""Meanings of the answers of `verdict_of`."""


def verdict_of(position: Position) -> str:
    """Verdict on what the processors did to the token of a position, a key of `VERDICTS`."""
    if position.token_id is None:
        return "failed"
    acted = [stage for stage in position.stages if stage.name != SAMPLER]
    model, last = acted[0], acted[-1]
    if last.num_left == 1 and last.name != MODEL:
        return "forced"
    return "kept" if model.candidates[:1] and _first(model) == _first(last) else "changed"


def _first(stage: Stage) -> int | None:
    return stage.candidates[0].token_id if stage.candidates else None
