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
    """Timer of the attempts for one connection.

    Args:
        attempt: Sends the client something; False if there is no need for another attempt.
    """

    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin anew."""
        self.stop()
        self._delays_s = chain(PROBES_S, repeat(PROBES_S[-1]))
        self._wait()

    def stop(self) -> None:
        """Make no further attempt. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(next(self._delays_s), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._attempt():
            self._wait()
