"""Host memory: huge pages for weights and KV, and an allocator that keeps what a step frees.

Linux only, and only advice to the kernel: without it nothing changes but the speed.

What every step reads lies in huge pages: with small ones, address translation (TLB misses) takes
about a tenth of a decode step, and the memory of another process, which is read through the kernel
page by page, is read at less than half the speed. What a step frees is kept for the next one:
otherwise the kernel takes it back, and clears it again, many times a step.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from worker.models.huge_pages import (
    ALIGNMENT_BYTES,
    HUGE_PAGE_BYTES,
    MADV_COLLAPSE,
    MADV_DONTNEED,
    MADV_HUGEPAGE,
    advise,
    huge_pages,
)

logger = logging.getLogger(__name__)

_RESIDENT_PART = 0.9
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_TEMPORARY = 64 * 2**20
_MOST_KEPT = 512 * 2**20
_SMAPS = Path("/proc/self/smaps")


def zeros(count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """`count` contiguous tensors of zeros; in a CPU's memory one after the other in one block of
    huge pages.

    The system gives such a page when it is written to for the first time, and zeros until then.
    Small tensors, and those on other devices, are torch's own.

    Raises:
        RuntimeError: the memory is not there.
    """
    if device.type != "cpu":
        return [torch.zeros(tuple(shape), dtype=dtype, device=device) for _ in range(count)]
    return _placed([(tuple(shape), dtype)] * count)


def like(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous tensors of zeros of the same shapes and data types, in a CPU's memory as those of
    `zeros`.

    Raises:
        RuntimeError: the memory is not there.
    """
    return _placed([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])


def _placed(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    """Tensors of zeros of these shapes and data types, one after the other."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
    starts = list(accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0))
    total = starts.pop()
    if total < HUGE_PAGE_BYTES:
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
    try:
        whole = torch.frombuffer(huge_pages(total), dtype=torch.uint8)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"not enough memory: {total} bytes ({error})") from error
    return [
        whole[at : at + size].view(dtype).view(shape)
        for at, size, (shape, dtype) in zip(starts, sizes, kinds, strict=True)
    ]


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Give the huge pages of tensors on a CPU back to the system; they read as zeros afterwards.

    Those on other devices, each in a storage of its own, have no memory until `take_back`.
    """
    spans: list[list[int]] = []
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.untyped_storage().resize_(0)
            continue
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if spans and 0 <= start - spans[-1][1] < ALIGNMENT_BYTES:  # the next one of a block
            spans[-1][1] = stop
        else:
            spans.append([start, stop])
    for start, stop in spans:
        advise(start, stop, MADV_DONTNEED)


def take_back(tensors: Iterable[torch.Tensor]) -> None:
    """Allocate the memory of tensors that have none since `give_back`; they read as zeros.

    Raises:
        RuntimeError: the memory is not there; they have none, still.
    """
    without = [tensor for tensor in tensors if tensor.nbytes and not tensor.untyped_storage().nbytes()]
    try:
        for tensor in without:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()
    except RuntimeError:
        give_back(without)
        raise


def free_cycles() -> None:
    """Free what nothing but itself refers to, as networks of transformers' modules do; also among
    objects that `gc.freeze` has put aside, at which no other collection looks.
    """
    is_frozen = bool(gc.get_freeze_count())
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


def give_back_freed() -> None:
    """Give back to the system what malloc keeps of freed memory, and torch of a GPU's, with that of
    `free_cycles`.
    """
    free_cycles()
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def keep_freed() -> None:
    """Let malloc keep the memory of freed temporary tensors, `_MOST_KEPT` bytes per thread."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_TEMPORARY)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def collapse_resident() -> None:
    """Move the large memory mappings of this process, weights above all, into huge pages.

    All mappings, since oneDNN does not say where its packed weights are.
    """
    if sys.platform != "linux":
        return
    moved = 0
    for start, stop in _resident_mappings(_SMAPS.read_text(encoding="ascii", errors="replace")):
        if advise(start, stop, MADV_HUGEPAGE) and advise(start, stop, MADV_COLLAPSE):
            moved += stop - start
    logger.debug("%d MB are in huge pages", moved // 10**6)


def _resident_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Address ranges of large anonymous writable mappings that are nearly all in use."""
    start = stop = 0
    for line in smaps.splitlines():
        words = line.split()
        if words[0] == "Rss:":
            if stop - start >= HUGE_PAGE_BYTES and 1024 * int(words[1]) >= _RESIDENT_PART * (stop - start):
                yield start, stop
        elif not words[0].endswith(":"):
            start = stop = 0
            if words[1] == "rw-p" and words[4] == "0" and (len(words) == 5 or words[5] == "[heap]"):
                start, stop = (int(address, 16) for address in words[0].split("-"))
