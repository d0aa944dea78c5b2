"""Turns between clients for slots, such as the threads that requests are prepared in."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


class ClientTurns:
    """Slots, for which clients wait in turn: for each slot that a client gets, it waits for one of
    each other client at most. Requests of one client keep their order. One event loop only.

    Args:
        slots: Number of slots.
        spare: Slots among them that one client leaves to the others.
    """

    def __init__(self, slots: int, spare: int = 0) -> None:
        self._slots = slots
        self._most = slots - spare  # of one client
        self._taken: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiting.values()))
        return f"ClientTurns({self._taken.total()} of {self._slots} taken, {waiting} waiting)"

    @asynccontextmanager
    async def turn(self, client: Hashable | None) -> AsyncIterator[None]:
        """Hold a slot, once it is the client's turn.

        Args:
            client: Label of the client; None counts as a separate client.
        """
        client = await self._granted(client)
        try:
            yield
        finally:
            self._release(client)

    async def in_thread(
        self,
        client: Hashable | None,
        threads: Executor,
        call: Callable[[], T],
        limit_s: float | None = None,
        overdue: Callable[[], None] = lambda: None,
    ) -> T:
        """Result of ``call`` in a thread, once it is the client's turn. The slot is held until the
        thread is done with it, also where nobody waits for the result any more.

        Args:
            client: See `turn`.
            threads: Threads, as many as there are slots, and more where calls may be overdue.
            call: Function that may raise anything.
            limit_s: Seconds after which the slot is free again, though the thread is not done.
            overdue: Called then.

        Raises:
            TimeoutError: the call takes longer.
        """
        client, loop = await self._granted(client), asyncio.get_running_loop()
        is_held, expiry = True, None

        def free() -> None:
            nonlocal is_held
            if expiry is not None:
                expiry.cancel()
            if is_held:
                is_held = False
                self._release(client)

        def expire() -> None:
            if is_held:
                free()
                overdue()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(free)

        try:
            found = threads.submit(call)
        except RuntimeError:  # they are shut down
            free()
            raise
        found.add_done_callback(ended)
        expiry = None if limit_s is None else loop.call_later(limit_s, expire)
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(found)

    async def _granted(self, client: Hashable | None) -> Hashable:
        """The client of a slot, once it is its turn."""
        client = object() if client is None else client
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._leave(client, granted)
            else:  # it had its turn a moment ago
                self._release(client)
            raise
        return client

    def _grant(self) -> None:
        """Give free slots to the clients that are next."""
        while self._taken.total() < self._slots:
            client = next((each for each in self._waiting if self._taken[each] < self._most), None)
            if client is None:
                return
            requests = self._waiting.pop(client)
            granted = requests.popleft()
            if requests:
                self._waiting[client] = requests  # behind the other clients
            if not granted.done():  # else it is about to leave
                granted.set_result(None)
                self._taken[client] += 1

    def _release(self, client: Hashable) -> None:
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._grant()

    def _leave(self, client: Hashable, granted: asyncio.Future[None]) -> None:
        requests = self._waiting.get(client, deque())
        if granted in requests:
            requests.remove(granted)
        if not requests:
            self._waiting.pop(client, None)
