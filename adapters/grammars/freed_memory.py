"""Memory that the allocator has freed, returned to the system."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable

TRIM_S = 10.0
"""Seconds of compiling and refusing after which freed memory is returned to the system.

Grammars are freed in pieces of every size: without trimming, resident memory grows although the
allocated bytes do not. It takes some 10 ms.
"""


class FreedMemory:
    """Returns freed memory to the system, at most once in `TRIM_S`. Thread-safe.

    Args:
        clock: Monotonic clock, seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trimmed_at = clock()
        self._lock = threading.Lock()

    def trim_if_due(self) -> None:
        """Return it, if `TRIM_S` have passed since the last time."""
        now = self._clock()
        with self._lock:
            if now < self._trimmed_at + TRIM_S:
                return
            self._trimmed_at = now
        _trim()


def _trim() -> None:
    """Return free memory to the system, if the allocator is glibc's."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
