"""A window of unknown errors; too many of them mean that the engine is broken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class FaultWindow:
    """Counts unknown errors; ``limit`` of them within ``window_s`` seconds mean a broken engine.

    One unknown error ends one request. The first never ends the worker: the request may have been
    the cause, and the runtime would send it to the next worker.
    """

    def __init__(self, limit: int = 8, window_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque(maxlen=limit)

    def record(self) -> bool:
        """Count one unknown error; whether the limit is reached."""
        now = self._clock()
        self._times.append(now)
        return len(self._times) == self.limit and now - self._times[0] <= self.window_s
