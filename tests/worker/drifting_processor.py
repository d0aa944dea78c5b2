"""A third party's logits processor, for the tests of migration."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Drifts:
    """Dynamo's shape, with state made of the logits of every step so far."""

    def __init__(self) -> None:
        self.mean: torch.Tensor | None = None

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        now = logits.softmax(-1)
        self.mean = now if self.mean is None else 0.7 * self.mean + 0.3 * now
        logits -= 40 * self.mean
