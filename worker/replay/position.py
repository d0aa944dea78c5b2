"""The effect of each processor of a request on the logits of its positions."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain, apply_plan
from worker.engines.embedded.companions import share_row
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.plan import Request
from worker.engines.embedded.sampling.rows import controls_of
from worker.engines.embedded.sampling.truncation import group_rows, truncate_and_sample
from worker.sampling import SamplingParams
from worker.sampling.field_processors import late_controls

NUM_CANDIDATES = 5
"""Tokens shown after each processor."""

MODEL, SAMPLER = "model", "sampler"
"""Names of the stages before the first processor and after the last."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the most likely tokens of a row."""

    token_id: int
    probability: float


@dataclass(slots=True)
class Stage:
    """A row as the model computed it, after one processor, or as the sampler samples from it.

    Attributes:
        name: `MODEL`, the processor's, or `SAMPLER`.
        candidates: Highest probability first, of equal ones the lowest id; none of probability 0.
        num_left: Tokens that are not masked.
        failure: Reason why the processor failed; the row is then not known.
        taken_rank: Rank of the token that was taken, from 1; None if it is masked here.
        taken_probability: Probability of the token that was taken.
    """

    name: str
    candidates: list[Candidate] = field(default_factory=list)
    num_left: int = 0
    failure: str | None = None
    taken_rank: int | None = None
    taken_probability: float | None = None


@dataclass(slots=True)
class Position:
    """One position of an answer.

    Attributes:
        position: Absolute position, as in receipts.
        stages: Stages in the order in which they are applied.
        token_id: The token that was taken; None if the request ended before.
    """

    position: int
    stages: list[Stage]
    token_id: int | None = None


class PositionTap(LogitsTap):
    """A `LogitsTap` that applies a second copy of a request's processors one by one.

    Args:
        request: Request under way, with processors of its own.
        copy: The same request, never queued.
        undecodable_ids: Ids that are never sampled; see `Model`.
        positions: Absolute positions to look at; by default every one of the answer.
        num_candidates: Candidates that are kept of each stage.

    Attributes:
        positions: Positions found so far.
    """

    wants_generated = True

    def __init__(
        self,
        request: Request,
        copy: Request,
        undecodable_ids: Sequence[int],
        positions: Container[int] | None = None,
        num_candidates: int = NUM_CANDIDATES,
    ) -> None:
        self._request = request
        self._copy = copy
        self._never = list(undecodable_ids)
        self._wanted = positions
        self._num_candidates = num_candidates
        self._rows: list[torch.Tensor] = []  # of the last position, until its token is known
        self.positions: list[Position] = []
        share_row(copy.chain, request.chain)

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """The row ``[V]`` from which the token at `position` is sampled, perhaps once more."""
        while self.positions and self.positions[-1].position >= position:  # its token was rewound
            self.positions.pop()
            self._rows = []
        self.take(self._request.tokens[self._copy.prompt_length :])
        row = logits.to("cpu", torch.float32, copy=True)  # where a processor maps rows, as the sampler has it
        row[self._never] = -torch.inf
        chain = self._copy.chain
        if chain is not None and self._request.chain is not None:
            if chain.position > position:
                chain.rewind(position)
            for place in range(chain.position, position):
                chain.accept(self._request.tokens[place], place)
            chain.copy_ruled_out(self._request.chain)
        if self._wanted is None or position in self._wanted:
            self.positions.append(Position(position, list(self._look(chain, row))))
        elif chain is not None and chain.observes_logits:
            apply_chain(chain, row, self._never)

    def take(self, token_ids: Sequence[int]) -> None:
        """Note which token the last position took, once it is among the answer's `token_ids`."""
        if not self._rows:
            return
        last = self.positions[-1]
        place = last.position - self._copy.prompt_length
        if place >= len(token_ids):
            return
        last.token_id = token_ids[place]
        for stage, row in zip(last.stages, self._rows, strict=False):  # a failed stage has no row
            stage.taken_rank, stage.taken_probability = _rank(row, last.token_id)
        self._rows = []

    def forget_from(self, position: int) -> None:
        """Drop the positions from `position` on, which are not part of the answer."""
        while self.positions and self.positions[-1].position >= position:
            self.positions.pop()

    def _look(self, chain: ProcessorChain | None, row: torch.Tensor) -> Iterator[Stage]:
        self._rows = []
        yield self._stage(MODEL, row)
        if chain is not None:
            try:
                for member, plan in chain.plan_each():
                    apply_plan(chain, plan, row, self._never)
                    row[self._never] = -torch.inf
                    yield self._stage(member.name, row)
            except ProcessorFailed as failure:
                yield Stage(failure.processor, failure=failure.message)
                return
        if bool(row.max().isfinite()):
            yield self._stage(SAMPLER, _sampled_from(row, self._request.params))

    def _stage(self, name: str, row: torch.Tensor) -> Stage:
        self._rows.append(row.clone())
        order = row.sort(descending=True, stable=True).indices[: self._num_candidates].tolist()
        shares = row.double().softmax(-1)[order].tolist()
        candidates = [Candidate(*each) for each in zip(order, shares, strict=True) if each[1] > 0]
        return Stage(name, candidates, int((row > -torch.inf).sum()))


def _sampled_from(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits ``[V]`` of what the sampler leaves of a row: one token if greedy, else a nucleus."""
    if params.is_greedy:
        left = torch.full_like(row, -torch.inf)
        left[row.sort(descending=True, stable=True).indices[0]] = 0.0
        return left
    host = row.cpu().unsqueeze(0)
    groups = group_rows({0: controls_of(params)}, len(row))
    _, weights = truncate_and_sample(host, groups, {0: 0.0}, wanted={0})
    return weights[0].double().log_()


def _rank(row: torch.Tensor, token_id: int) -> tuple[int | None, float]:
    """Rank from 1, None if it is masked, and probability of a token; equal ones by rising id."""
    value = row[token_id]
    if not math.isfinite(float(value)):
        return None, 0.0
    before = int((row > value).sum()) + int((row[:token_id] == value).sum())
    return before + 1, float(row.double().softmax(-1)[token_id])


def table(found: Position, prompt_length: int, params: SamplingParams, tokenizer: Any) -> list[str]:
    """Lines: the most likely tokens before and after each processor, and the token taken.

    Args:
        found: Stages of the position.
        prompt_length: Tokens of the prompt.
        params: Sampling parameters that the sampler was given.
        tokenizer: Shows tokens as text.
    """
    if found.token_id is None:
        return [f"position {found.position}: the replay ended before it"]

    def shown(token_id: int) -> str:
        return f"{token_id} {tokenizer.decode([token_id])!r}"

    def line(stage: Stage) -> str:
        if stage.failure is not None:
            return f"failed: {stage.failure}"
        return "  ".join(f"{shown(one.token_id)} {one.probability:.1%}" for one in stage.candidates)

    stages = [(stage.name, line(stage)) for stage in found.stages if stage.name != SAMPLER]
    taken = f"{sampler(params)}: took {shown(found.token_id)}"
    rows = [("after", "likeliest tokens: id, text, probability"), *stages, (SAMPLER, taken)]
    width = max(len(name) for name, _ in rows)
    title = f"position {found.position}, token {found.position - prompt_length + 1} of the answer"
    return [title, *(f"{name:<{width}}  {text}" for name, text in rows)]


def sampler(params: SamplingParams) -> str:
    """The controls that are left to the sampler after the processors."""
    if params.is_greedy:
        return "greedy"
    names = [one.name for one in late_controls(type(params))]
    found = [f"{name} {value:g}" for name in names if (value := getattr(params, name)) is not None]
    return ", ".join(found) or "temperature 1"
