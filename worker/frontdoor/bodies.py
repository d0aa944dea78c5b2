"""Memory for the bodies of requests under way: no client can take all of it.

Bodies up to `SMALL` have room of their own, so that large ones keep none of them out. Where room is
short, the body that has come slowest goes, and not the one that has just begun; and one that does
not get on is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.frontdoor.errors import Refused

SMALL = 64 * 1024
"""Bytes of a body that counts as small."""

SMALL_ROOM = 64 * 2**20
"""Bytes of all small bodies together."""

LARGE_AT_ONCE = 16
"""Bodies of the largest size that are in memory at a time, beside the small ones."""

HELD_AT_ONCE = 64
"""Bodies of the largest size that are in memory at a time while their requests are answered."""

WINDOW_S = 10.0
"""Seconds in which a body must get on by as many bytes as the least rate asks for."""


class Bodies:
    """Room for all bodies.

    Args:
        largest: Bytes of the largest body.
        least_rate: Bytes per second.
        timeout_s: Seconds in which a body must arrive.
        now: The clock.
    """

    def __init__(self, largest: int, least_rate: float, timeout_s: float, now: Callable[[], float]) -> None:
        self.largest = largest
        self.least_rate = least_rate
        self.timeout_s = timeout_s
        self.now = now
        self.small = Room(SMALL_ROOM, now)
        self.large = Room(LARGE_AT_ONCE * max(largest, SMALL), now)
        self.held = Room(HELD_AT_ONCE * max(largest, SMALL), now)

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies that are in memory."""
        return self.small.num_bytes + self.large.num_bytes + self.held.num_bytes

    def begin(self, too_slow: Callable[[Refused], None]) -> Body:
        """A body of which nothing has come; ``too_slow`` ends its request to make room."""
        return Body(self, too_slow)


class Body:
    """One body.

    Args:
        bodies: The room for it.
        too_slow: Ends its request.
    """

    __slots__ = ("_bodies", "_mark", "_parts", "_room", "begun_s", "is_complete", "num_bytes", "too_slow")

    def __init__(self, bodies: Bodies, too_slow: Callable[[Refused], None]) -> None:
        self._bodies = bodies
        self._parts: bytes | bytearray = b""
        self._room: Room | None = None
        self.too_slow = too_slow
        self.begun_s = bodies.now()
        self._mark = (self.begun_s, 0)  # when it had got on, and how far
        self.num_bytes = 0
        self.is_complete = False

    def add(self, part: bytes) -> None:
        """Take the next bytes. Raises `Refused` (503) if there is no room, and no slower body."""
        if not self._parts:
            self._parts = part
        else:
            if isinstance(self._parts, bytes):
                self._parts = bytearray(self._parts)
            self._parts += part
        num_bytes = len(part)
        self.num_bytes += num_bytes
        room = self._bodies.small if self.num_bytes <= SMALL else self._bodies.large
        if room is not self._room:
            self._leave(self.num_bytes - num_bytes)
            self._room, num_bytes = room, self.num_bytes
        room.grow(self, num_bytes)

    def take(self) -> bytes:
        """All of it. It keeps its room until `free`."""
        self.is_complete = True
        whole, self._parts = bytes(self._parts), b""
        return whole

    def hold(self) -> None:
        """Stay in memory until `free`, while its request is answered; a small one needs no room.

        Raises:
            Refused: 503, too many stay.
        """
        self._leave(self.num_bytes)
        if self.num_bytes > SMALL:
            self._room = self._bodies.held
            self._room.grow(self, self.num_bytes)

    def free(self) -> None:
        """Give its room back. Idempotent."""
        self._leave(self.num_bytes)
        self._parts, self.num_bytes = b"", 0

    def left_s(self) -> float:
        """Seconds until it counts as too slow, unless more of it comes."""
        now = self._bodies.now()
        if self.num_bytes - self._mark[1] >= self._bodies.least_rate * WINDOW_S:
            self._mark = (now, self.num_bytes)
        return max(0.0, min(self.begun_s + self._bodies.timeout_s, self._mark[0] + WINDOW_S) - now)

    def _leave(self, num_bytes: int) -> None:
        if self._room is not None:
            self._room.shrink(self, num_bytes)
            self._room = None


class Coming(Protocol):
    """A body that takes up room while it comes.

    Attributes:
        begun_s: Time at which it began.
        num_bytes: Bytes that have come.
        is_complete: Whether all of it has come.
        too_slow: Ends its request.
    """

    begun_s: float
    num_bytes: int
    is_complete: bool
    too_slow: Callable[[Refused], None]

    def free(self) -> None:
        """Give its room back. Idempotent."""


class Room:
    """Room for bodies of one kind.

    Args:
        capacity: Bytes.
        now: The clock.
    """

    def __init__(self, capacity: int, now: Callable[[], float]) -> None:
        self._capacity = capacity
        self._now = now
        self._bodies: dict[Coming, None] = {}  # in order of arrival
        self.num_bytes = 0

    def grow(self, body: Coming, num_bytes: int) -> None:
        """More of a body has come. Raises `Refused` (503) if it is the slowest of too many."""
        self._bodies[body] = None
        self.num_bytes += num_bytes
        while self.num_bytes > self._capacity:
            coming = [each for each in self._bodies if not each.is_complete]
            now = self._now()
            slowest = min(coming, key=lambda each: each.num_bytes / max(now - each.begun_s, 1e-3), default=body)
            if slowest is body:
                raise Refused(503, "too many bodies at a time", kind="server_error")
            slowest.too_slow(Refused(408, "the body came slower than others, which needed its room"))
            slowest.free()

    def shrink(self, body: Coming, num_bytes: int) -> None:
        """So much of a body is no longer there, and nothing is left of it."""
        self.num_bytes -= num_bytes
        self._bodies.pop(body, None)
