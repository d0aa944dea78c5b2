"""Logits of every token of a prompt, for the taps that want them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.engines.embedded.plan import Plan

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are in memory at a time: those of a whole chunk take gigabytes with a
large vocabulary.
"""


def show_scored(plan: Plan, rows: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Show the taps of ``plan.scored`` the logits of every token, few at a time.

    Args:
        plan: Plan of the step.
        rows: Input of `logits`, ``[T, ...]``, one row per token of the step.
        logits: Function from n rows to their logits ``[n, V]``.
    """
    first = plan.num_decode_tokens
    for chunk in plan.chunks:
        if chunk.is_scored:
            for start in range(chunk.first_scored, chunk.stop, SCORED_AT_ONCE):
                stop = min(start + SCORED_AT_ONCE, chunk.stop)
                some = rows[first + start - chunk.start : first + stop - chunk.start]
                chunk.request.show_prompt(start, logits(some))
        first += chunk.stop - chunk.start
