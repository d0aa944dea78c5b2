"""A third-party processor that fails."""

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
