"""Shared memory of a GPU, which bounds what a program keeps at a time."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have: 99 KiB on GPUs of compute capability 8.6, 8.9 and
    12.0, 163 KiB or more on others from 8.0 on.
    """
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return found
