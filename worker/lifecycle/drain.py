"""Admission and graceful shutdown: requests in flight finish within a budget, the rest migrate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.errors import Draining, InvalidRequest

MIGRATION_TIMEOUT_S = 2.0
"""Time for streams to pass `Draining` on to the runtime once the engine has ended its requests."""

FLUSH_S = 1.0
"""Time for the runtime to send its last chunks; it closes connections without waiting for them."""


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
    """The requests in flight, and whether new ones are admitted. One event loop only.

    A request is released at the end of its stream or when it is aborted, whichever comes first: a
    cancelled stream may be closed much later, by the garbage collector, when its id may already
    belong to a new request.

    Attributes:
        closed: Whether no more requests are admitted.
        block_size: Tokens per KV block.
        num_blocks: KV blocks that the requests in flight need.
        last_release_s: Time of the last release by the event loop's clock, None before the first.
        on_change: Called whenever `num_blocks` may have changed.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, InFlightRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._stop_waiting = asyncio.Event()
        self.last_release_s: float | None = None
        self.closed = False
        self.block_size = 1
        self.num_blocks = 0
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def admit(self, request_id: str, num_tokens: int) -> InFlightRequest:
        """Admit a request.

        Raises:
            Draining: no more requests are admitted.
            InvalidRequest: a request with this id is in flight already.
        """
        if self.closed:
            raise Draining("this worker is shutting down")
        if request_id in self._by_id:
            raise InvalidRequest("request id", f"{request_id[:60]!r} is being served already")
        admitted = InFlightRequest(request_id, num_tokens)
        self._by_id[request_id] = admitted
        self._empty.clear()
        self.num_blocks += self._blocks(num_tokens)
        return admitted

    def grow(self, admitted: InFlightRequest, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of a request, if it is still in flight."""
        if self._by_id.get(admitted.request_id) is admitted:
            before = self._blocks(admitted.num_tokens)
            admitted.num_tokens += num_tokens
            self.num_blocks += self._blocks(admitted.num_tokens) - before
            self.on_change()

    def release(self, admitted: InFlightRequest) -> None:
        """The request has ended. Idempotent."""
        if self._by_id.get(admitted.request_id) is admitted:
            self.release_id(admitted.request_id)

    def release_id(self, request_id: str) -> bool:
        """Release the request with this id; whether there was one."""
        admitted = self._by_id.pop(request_id, None)
        if admitted is not None:
            self.last_release_s = asyncio.get_running_loop().time()
            self.num_blocks -= self._blocks(admitted.num_tokens)
            self.on_change()
        if not self._by_id:
            self._empty.set()
        return admitted is not None

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def close(self) -> None:
        """Admit no more requests."""
        self.closed = True

    def stop_waiting(self) -> None:
        """End `wait_empty`: what is in flight is to migrate at once."""
        self._stop_waiting.set()

    async def wait_empty(self, timeout_s: float) -> None:
        """Until no request is in flight, `timeout_s` is over, or `stop_waiting` was called."""
        waits = {asyncio.create_task(event.wait()) for event in (self._empty, self._stop_waiting)}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def wait_migrated(self) -> None:
        """Until no request is in flight, or `MIGRATION_TIMEOUT_S` is over."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(MIGRATION_TIMEOUT_S):
                await self._empty.wait()


class MigratesRequests(Protocol):
    """Ends every request in flight with `Draining`, so that the runtime migrates it."""

    def migrate_all(self) -> int:
        """End them; returns how many there were."""


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """Outcome of a drain.

    Attributes:
        num_finished: Requests that were in flight and finished (or were cancelled by their client).
        num_migrated: Requests that ended with `Draining`.
    """

    num_finished: int
    num_migrated: int


async def drain(in_flight: InFlightRequests, engine: MigratesRequests, budget_s: float) -> DrainOutcome:
    """Admit no more requests, wait up to ``budget_s`` for those in flight, let the rest migrate."""
    in_flight.close()
    before = len(in_flight)
    await in_flight.wait_empty(budget_s)
    remaining = len(in_flight)
    if remaining:
        engine.migrate_all()
        await in_flight.wait_migrated()
    if in_flight.last_release_s is not None:
        elapsed_s = asyncio.get_running_loop().time() - in_flight.last_release_s
        await asyncio.sleep(max(0.0, FLUSH_S - elapsed_s))
    return DrainOutcome(before - remaining, remaining)
