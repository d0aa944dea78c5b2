"""Admission, and the drain: in-flight requests finish within a budget, the rest are handed to
another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Protocol

from worker.errors import Draining, InvalidRequest

MIGRATION_TIMEOUT_S = 2.0
"""Time for streams to carry `Draining` out to the runtime once the engine has given its requests
away.
"""

FLUSH_S = 1.0
"""Time for the runtime to send what it was given last; it closes its connections without waiting
for that.
"""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One admitted request.

    Attributes:
        request_id: Id that the runtime gave it.
        num_tokens: Tokens of prompt and answer so far; only `InFlightRequests.grow` changes it.
    """

    request_id: str
    num_tokens: int


class InFlightRequests:
    """Who may enter, and who is inside. One event loop only.

    A request leaves at the end of its stream or when it is aborted, whichever comes first: a
    cancelled stream may be closed much later, by the garbage collector, when its id may already
    belong to a new request.
    """

    def __init__(self) -> None:
        self._inside: dict[str, InFlightRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurry = asyncio.Event()
        self._last_left: float | None = None
        self.closed = False
        self.block_size = 1
        self.num_blocks = 0
        """KV blocks of `block_size` tokens that the requests inside need."""

    def __len__(self) -> int:
        return len(self._inside)

    def admit(self, request_id: str, num_tokens: int) -> InFlightRequest:
        """Admit a request.

        Raises:
            Draining: the in_flight is closed.
            InvalidRequest: a request with this id is inside already.
        """
        if self.closed:
            raise Draining("this worker is shutting down")
        if request_id in self._inside:
            raise InvalidRequest("request id", f"{request_id[:60]!r} is being served already")
        admitted = InFlightRequest(request_id, num_tokens)
        self._inside[request_id] = admitted
        self._empty.clear()
        self.num_blocks += self._blocks(num_tokens)
        return admitted

    def grow(self, admitted: InFlightRequest, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of a request, if it is still inside."""
        if self._inside.get(admitted.request_id) is admitted:
            before = self._blocks(admitted.num_tokens)
            admitted.num_tokens += num_tokens
            self.num_blocks += self._blocks(admitted.num_tokens) - before

    def release(self, admitted: InFlightRequest) -> None:
        """Idempotent."""
        if self._inside.get(admitted.request_id) is admitted:
            self.release_id(admitted.request_id)

    def release_id(self, request_id: str) -> bool:
        """Make the request with this id leave; whether there was one."""
        admitted = self._inside.pop(request_id, None)
        if admitted is not None:
            self._last_left = asyncio.get_running_loop().time()
            self.num_blocks -= self._blocks(admitted.num_tokens)
        if not self._inside:
            self._empty.set()
        return admitted is not None

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def close(self) -> None:
        """Admit nobody from now on."""
        self.closed = True

    def stop_waiting(self) -> None:
        """End the drain's patience."""
        self._hurry.set()

    async def wait_empty(self, timeout_s: float) -> None:
        """Until everybody has left, `timeout_s` is over, or somebody is in a hurry."""
        waits = {asyncio.create_task(event.wait()) for event in (self._empty, self._hurry)}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def wait_migrated(self) -> None:
        """Until everybody has left, or `MIGRATION_TIMEOUT_S` is over."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), MIGRATION_TIMEOUT_S)

    async def settle(self) -> None:
        """Until the last one who left has been gone for `FLUSH_S`."""
        if self._last_left is not None:
            elapsed = asyncio.get_running_loop().time() - self._last_left
            await asyncio.sleep(max(0.0, FLUSH_S - elapsed))


class MigratesRequests(Protocol):
    """Whoever can end every request that is left with `Draining`."""

    def migrate_all(self) -> int:
        """Do so; returns how many there were."""


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """How a drain ended.

    Attributes:
        num_finished: Requests that were in flight and finished (or were cancelled by their client).
        num_migrated: Requests that ended with `Draining`.
    """

    num_finished: int
    num_migrated: int


async def drain(in_flight: InFlightRequests, engine: MigratesRequests, budget_s: float) -> DrainOutcome:
    """Close the in_flight, wait up to ``budget_s`` for the requests inside, give the rest away."""
    in_flight.close()
    inside = len(in_flight)
    await in_flight.wait_empty(budget_s)
    remaining = len(in_flight)
    if remaining:
        engine.migrate_all()
        await in_flight.wait_migrated()
    await in_flight.settle()
    return DrainOutcome(inside - remaining, remaining)
