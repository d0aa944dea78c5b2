"""What each processor of a request did to the logits of one position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain, apply_plan
from worker.engines.embedded.plan import Request
from worker.sampling import SamplingParams

NUM_CANDIDATES = 5
"""Tokens shown after each processor."""


class PositionTap:
    """A `LogitsTap` that applies a second copy of a request's processors one by one at a position.

    Args:
        request: Under way, with processors of its own.
        copy: The same request, never queued.
        position: Absolute.
        undecodable_ids: Never sampled; see `Model`.
        tokenizer: Shows tokens as text.
    """

    wants_generated = True
    wants_prompt = False
    first_wanted = 0

    def __init__(
        self, request: Request, copy: Request, position: int, undecodable_ids: Sequence[int], tokenizer: Any
    ) -> None:
        self._request = request
        self._copy = copy
        self._position = position
        self._never = list(undecodable_ids)
        self._tokenizer = tokenizer
        self._stages: list[tuple[str, str]] = []

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Not wanted."""

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """The row ``[V]`` from which the token at `position` is sampled."""
        if position > self._position:
            return
        row = logits.float().clone()
        row[self._never] = -torch.inf
        chain = self._copy.chain
        if chain is not None:
            for place in range(chain.position, position):
                chain.accept(self._request.tokens[place], place)
        if position == self._position:
            self._stages = list(self._look(chain, row))
        elif chain is not None and chain.observes_logits:
            apply_chain(chain, row)

    def _look(self, chain: ProcessorChain | None, row: torch.Tensor) -> Iterator[tuple[str, str]]:
        yield "model", self._candidates(row)
        if chain is None:
            return
        try:
            for member, plan in chain.plan_each():
                apply_plan(chain, plan, row)
                row[self._never] = -torch.inf
                yield member.name, self._candidates(row)
        except ProcessorFailed as failure:
            yield failure.processor, f"failed: {failure.message}"

    def _candidates(self, row: torch.Tensor) -> str:
        order = row.sort(descending=True, stable=True).indices[:NUM_CANDIDATES].tolist()
        shares = row.double().softmax(-1)[order].tolist()
        shown = zip(order, shares, strict=True)
        return "  ".join(f"{self._token(one)} {share:.1%}" for one, share in shown if share > 0)

    def _token(self, token_id: int) -> str:
        return f"{token_id} {self._tokenizer.decode([token_id])!r}"

    def table(self, token_ids: Sequence[int]) -> list[str]:
        """Lines: the likeliest tokens before and after each processor, and the token taken.

        Args:
            token_ids: Of the answer.
        """
        place = self._position - self._copy.prompt_length
        if place >= len(token_ids):
            return [f"position {self._position}: the replay ended before it"]
        taken = f"{sampler(self._copy.params)}: took {self._token(token_ids[place])}"
        rows = [("after", "likeliest tokens: id, text, probability"), *self._stages, ("sampler", taken)]
        width = max(len(name) for name, _ in rows)
        title = f"position {self._position}, token {place + 1} of the answer"
        return [title, *(f"{name:<{width}}  {text}" for name, text in rows)]


def sampler(params: SamplingParams) -> str:
    """What is left to the sampler when the processors have acted."""
    if params.is_greedy:
        return "greedy"
    names = ("temperature", "min_p", "top_k", "top_p")
    found = [f"{name} {value:g}" for name in names if (value := getattr(params, name)) is not None]
    return ", ".join(found) or "temperature 1"
