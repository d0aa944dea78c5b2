"""Third-party processors with faults; importable, because the executor's process unpickles them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from adapters.trtllm import Report


class Faulty:
    """Bans nothing until ``at``, then shows its fault."""

    def __init__(self, fault: str, at: int) -> None:
        self.fault, self.at = fault, at

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        if len(input_ids) < self.at:
            return
        if self.fault == "raises":
            raise RuntimeError("the text of a prompt")
        if self.fault == "nan":
            logits[3] = float("nan")
        elif self.fault == "empty":
            logits.fill_(-torch.inf)
        elif self.fault == "shape":
            logits += torch.zeros(len(logits) + 1)
        elif self.fault == "dies":
            os._exit(9)


class Raw:
    """A TensorRT-LLM callable of somebody else: no adapter around it, and it raises."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.report: Report | None = None

    def __call__(self, req_id, logits, token_ids, stream_ptr, client_id) -> None:
        if len(token_ids[0]) >= self.at:
            raise ValueError("no")
        logits[0, 0, 40] += 100.0
