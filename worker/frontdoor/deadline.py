"""Deadlines of a connection, with one timer."""

from __future__ import annotations

import asyncio

RESOLUTION_S = 0.001
"""Seconds by which a timer may ring too early."""

STOPPED_S = 1.0
"""Seconds by which a timer rings too late where the process was stopped, or its machine slept."""

GRACE_S = 1.0
"""Seconds that what has come meanwhile gets to be read, before a deadline counts as passed."""


class WaitingProtocol(asyncio.Protocol):
    """A connection that waits for one thing at a time, and not for ever.

    What it waits for changes several times per request, and each wait is longer than a request
    takes. The timer stays as it is where the deadline moves back, and is set again if it rings
    before it: one timer per connection instead of four per request.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._grace_end = 0.0  # no deadline passes before it

    def _expect(self, seconds: float) -> None:
        """Call `_late` unless the deadline is moved within so many seconds; not at once where the
        process was stopped: the loop may call timers before it reads, and reads parts.
        """
        now = self._loop.time()
        if self._deadline is not None and now - self._deadline > STOPPED_S:
            self._grace_end = now + GRACE_S
        self._deadline = deadline = max(now + seconds, self._grace_end)
        if self._timer is not None and deadline < self._timer.when():
            self._cancel_timer()
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._ring)

    def _expect_nothing(self) -> None:
        """Wait for ever."""
        self._deadline = None

    def _late(self) -> None:
        """Handle a deadline that has passed."""
        raise NotImplementedError

    def _ring(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        left = self._deadline - self._loop.time()
        if left > RESOLUTION_S:
            self._expect(left)
        elif left < -STOPPED_S:
            self._expect(0.0)
        else:
            self._deadline = None
            self._late()

    def _cancel_timer(self) -> None:
        """Stop the timer: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
