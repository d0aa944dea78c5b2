"""Tensors in huge pages, where the kernel has them for the asking.

Another process's memory is read through the kernel page by page, so a KV store in pages of 2 MiB is read more than
twice as fast as one in pages of 4 KiB; attention, too, looks up fewer addresses.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE_BYTES = 2 * 2**20
_ALIGNMENT_BYTES = 64
"""Of each tensor, as torch's own."""


def zeros(count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """`count` contiguous tensors of zeros; in a CPU's memory one after the other in one block of huge pages.

    Small ones, those on other devices, and those where the system knows no huge pages are torch's own.

    Raises:
        RuntimeError: the memory is not there.
    """
    used = math.prod(shape) * dtype.itemsize
    stride = -(-used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if device.type != "cpu" or count * stride < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.zeros(tuple(shape), dtype=dtype, device=device) for _ in range(count)]
    block = torch.empty(count * stride + HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE_PAGE_BYTES
    whole = block[start : start + count * stride]
    _advise(whole.data_ptr(), count * stride)  # before the first page is there
    whole.zero_()
    return [whole[at : at + used].view(dtype).view(tuple(shape)) for at in range(0, count * stride, stride)]


def _advise(address: int, num_bytes: int) -> None:
    """Ask for huge pages; a kernel without them refuses, and all else stays as it is."""
    library = ctypes.CDLL(None)
    library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(mmap.MADV_HUGEPAGE))
