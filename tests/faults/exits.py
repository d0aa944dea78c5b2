"""A third-party logits processor that ends its worker, as a bug in native code would."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from dynamo.logits_processing import BaseLogitsProcessor


class Exits(BaseLogitsProcessor):
    """Ends the process at its third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            os._exit(9)
