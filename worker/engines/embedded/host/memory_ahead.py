"""Memory of the KV store that is there before a step writes to it.

The system gives a huge page when it is written to for the first time, and clears it: 0.2 ms, and
4 ms on a virtual machine whose host does not have that memory yet. A page of KV lies in two huge
pages for each layer, mostly in the same ones as those before it; so now and then a step would wait
for 60 of them.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import torch

from worker.engines.daemon_threads import in_daemon_thread
from worker.models.huge_pages import HUGE_PAGE_BYTES, MADV_POPULATE_WRITE, madvise

START_S = 1.0
"""Seconds after which the first rows are touched: until then a worker's start needs all cores."""

_PAUSE = 3.0
"""Pause behind each huge page, in times that it took: steps need the cores, too."""

Touch = Callable[[list[torch.Tensor], float, threading.Event], None]


class MemoryAhead:
    """Has the rows of some tensors touched that are likely written next. Not for two threads.

    Rows that were never written are taken in ascending order, as `PagePool` does.

    Args:
        tensors: Contiguous tensors ``[num_rows, ...]`` in a CPU's memory, as `memory.zeros` makes
            them.
        touch: Gets the same rows of each tensor, the seconds after which it may touch them, and an
            event after which it shall not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], touch: Touch | None = None) -> None:
        self._tensors = list(tensors)
        self._touch = touch or _touch_in_thread
        self._num_rows = len(tensors[0])
        self._span = max(1, HUGE_PAGE_BYTES * self._num_rows // tensors[0].nbytes)
        self._stop = 0
        self._is_over = threading.Event()

    def begin(self) -> None:
        """Have the first rows touched, which a first request needs."""
        self._touch_to(self._span, START_S)

    def reach(self, row: int) -> None:
        """Row number `row` is written now: have those behind it touched, unless they have been."""
        if row + self._span // 2 >= self._stop - 1:
            self._touch_to(max(row + 1, self._stop) + self._span, 0)

    def forget(self) -> None:
        """The memory is given back to the system: no row is touched."""
        self._is_over.set()
        self._is_over, self._stop = threading.Event(), 0

    def _touch_to(self, stop: int, after_s: float) -> None:
        first, self._stop = self._stop, max(self._stop, min(stop, self._num_rows))
        if first < self._stop:
            self._touch([tensor[first : self._stop] for tensor in self._tensors], after_s, self._is_over)


def _touch_in_thread(tensors: Sequence[torch.Tensor], after_s: float, is_over: threading.Event) -> None:
    def touch() -> None:
        pause_s = after_s
        for tensor in tensors:
            if is_over.wait(pause_s):
                return
            started_s = time.perf_counter()
            if not populate(tensor):
                return
            pause_s = _PAUSE * (time.perf_counter() - started_s)

    with contextlib.suppress(RuntimeError):  # the system has no thread for it: steps get the memory as they write
        in_daemon_thread("kv-memory", touch)


def populate(tensor: torch.Tensor) -> bool:
    """Get the memory of a contiguous tensor from the system, as writing to it would; its values
    stay. Other threads may use it meanwhile.

    Returns:
        Whether the system did so.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return madvise(start, tensor.data_ptr() + tensor.nbytes - start, MADV_POPULATE_WRITE)
