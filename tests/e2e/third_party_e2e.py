"""Third parties' logits processors, as an operator would name them with ``--logits-processor
NAME=module:Class``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from dynamo.logits_processing import BaseLogitsProcessor


class OneToken(BaseLogitsProcessor):
    """Makes one token the most likely one by far, and every tenth call another one."""

    def __init__(self, token_id: int = 40, other: int = 41) -> None:
        self.token_id = token_id
        self.other = other
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        logits[self.other if self.calls % 10 == 0 else self.token_id] += 1e4


class Raises(BaseLogitsProcessor):
    """Raises at its third token, with a text that no client may see."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("secret of the operator")


class Poisons(BaseLogitsProcessor):
    """Leaves NaN in its row."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        logits[7] = float("nan")


class Hangs(BaseLogitsProcessor):
    """Never comes back from its third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            threading.Event().wait()


class Sleeps(BaseLogitsProcessor):
    """Takes 0.4 s for each token."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        time.sleep(0.4)
