"""Devices: uploads without synchronisation, and where kernels run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor copied to ``device`` without a host synchronisation.

    A copy to CUDA from pageable memory would wait, so the source is pinned.
    """
    if device.type != "cuda":
        return values.to(device)
    if not values.numel():
        return torch.empty(values.shape, dtype=values.dtype, device=device)
    return values.pin_memory().to(device, non_blocking=True)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Context in which kernels that are told no device, such as Triton's, run on this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def whole_numbers(numbers: Sequence[int]) -> torch.Tensor:
    """int64 ``[n]`` on the CPU, in a fraction of the time that `torch.tensor` takes."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def upload_ids(ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 ``[n]`` on ``device``, without a host synchronisation."""
    return upload(whole_numbers(ids), device)
