"""Observers of the logits of a request: what prompt scores, replays and tests see them with."""

from __future__ import annotations

import torch


class UnusableRow(Exception):
    """A row that a tap can make nothing of; the message is the reason that the caller is told."""


class LogitsTap:
    """Observer of a request's logits as the model computed them, before any control. This one wants
    none of them.

    It must not keep or change the tensors, which may be on a device. What it raises ends its own
    request with an error, and nothing else.

    Attributes:
        wants_generated: Whether it is shown the row of each token that is sampled.
        first_wanted: The first token whose row `see_prompt` wants.
    """

    wants_generated: bool = False
    first_wanted: int = 0

    @property
    def wants_prompt(self) -> bool:
        """Whether rows of prompt tokens are still wanted; until then, no prefix hit leads further
        than `first_wanted`.
        """
        return False

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Rows ``[n, V]`` of the tokens from `start` on, few at a time.

        Rows before `first_wanted` may be left out. After a preemption they come from the first
        token again, and continue beyond the prompt where the tokens of a step do.
        """

    def start_over(self) -> None:
        """The weights have changed while rows were wanted, or before the first token: all come
        again, of the new ones.
        """

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """The row ``[V]`` from which the token at `position` is sampled."""
