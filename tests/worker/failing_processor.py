"""A third party's logits processor that fails when it is told to, for the tests of replays."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FailsAt:
    """Dynamo's shape; changes nothing.

    Attributes:
        length: Tokens of prompt and answer at which it raises, None for never.
    """

    length: int | None = None

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        if len(input_ids) == self.length:
            raise RuntimeError("the test says so")
