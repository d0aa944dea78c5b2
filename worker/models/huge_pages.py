"""Memory in huge pages: Linux only, and only advice to the kernel, which changes the speed alone.

With small pages, address translation (TLB misses) takes about a tenth of a decode step.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import sys

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * 2**20

ALIGNMENT_BYTES = 64
"""Alignment of a tensor that lies in them, the same as torch's own."""

MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # since Linux 5.14
MADV_COLLAPSE = 25


def huge_pages(size: int) -> memoryview:
    """`size` bytes of zeros, from the beginning of a huge page on.

    The system gives such a page when it is written to for the first time, and zeros until then.

    Raises:
        OSError, OverflowError: the memory is not there.
    """
    block = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % HUGE_PAGE_BYTES
    view = memoryview(block)[start : start + size]
    advise(*address_of(view), MADV_HUGEPAGE)  # before the first page is there
    return view


def touch(view: memoryview) -> None:
    """Write zeros to bytes that are not in memory yet.

    The kernel that copies to them (``read``) holds the lock of the whole address space while it
    gets a page, 4 ms where a virtual machine's host has to find one; other threads then wait that
    load libraries. A program that writes itself does not.
    """
    start, stop = address_of(view)
    ctypes.memset(start, 0, stop - start)


def address_of(view: memoryview) -> tuple[int, int]:
    """Addresses of the beginning and the end of writable bytes."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
    return start, start + view.nbytes


def advise(start: int, stop: int, advice: int) -> bool:
    """Whether the kernel took the advice for the whole huge pages between two addresses."""
    start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (stop - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return length > 0 and madvise(start, length, advice)


def madvise(start: int, length: int, advice: int) -> bool:
    """Whether the kernel took the advice for a number of bytes, from the beginning of a page on."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) == 0:
        return True
    logger.debug("madvise(%d): %s", advice, errno.errorcode.get(ctypes.get_errno()))
    return False
