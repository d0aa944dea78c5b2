"""Third-party processors: one that fails, and one that makes all rows equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RaisesAtTheThird:
    """Raises at the third token of an answer, in Dynamo's convention."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError


class Fixed:
    """Puts the same logits in the place of the model's, at every position of every request."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        logits.copy_(torch.arange(len(logits)) % 7)
