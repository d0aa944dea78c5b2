"""Attempts to find out whether a client that sends no more has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain, repeat

PROBES_S = (0.25, 0.25, 5.0)
"""Seconds until each attempt, the last one again and again. The client may have left, and only an
error in answer to bytes that are sent to it shows that.
"""


class AbsenceProbe:
    """Timer of the attempts for one connection."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, attempt: Callable[[], bool]) -> None:
        """Begin anew.

        Args:
            attempt: Sends the client something; False if there is no need for another attempt.
        """
        self.stop()
        self._delays_s = chain(PROBES_S, repeat(PROBES_S[-1]))
        self._wait(attempt)

    def stop(self) -> None:
        """Make no further attempt. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, attempt: Callable[[], bool]) -> None:
        self._timer = asyncio.get_running_loop().call_later(next(self._delays_s), self._ring, attempt)

    def _ring(self, attempt: Callable[[], bool]) -> None:
        self._timer = None
        if attempt():
            self._wait(attempt)
