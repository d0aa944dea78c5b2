"""`DeltaStream`: the deltas of one request on their way from its engine to its consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from worker.engines import TokenDelta
from worker.errors import ServingError


@dataclass(slots=True, eq=False)
class DeltaStream:
    """The deltas of one request, in order, for one consumer who iterates over it in the event loop.

    Attributes:
        num_open: Choices that have not ended.
        done: Whether nothing more is sent: the last delta or an exception has been, or the consumer
            has left.
    """

    num_open: int = field(default=1, init=False)
    done: bool = field(default=False, init=False)
    _is_silent: bool = field(default=False, init=False)  # since the last `keep_alive`
    _items: deque[TokenDelta | ServingError] = field(default_factory=deque, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> TokenDelta:
        """Wait for the next delta. Raises what `fail` was given, once."""
        while not self._items:
            if self.done:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, ServingError):
            raise item
        return item

    @property
    def untaken(self) -> TokenDelta | None:
        """The newest delta, to which more can be added: it is not taken, and its choice goes on."""
        newest = self._items[-1] if self._items else None
        return newest if isinstance(newest, TokenDelta) and newest.finish_reason is None else None

    def put(self, delta: TokenDelta) -> None:
        """Send a delta, or more of the `untaken` one.

        Nothing follows one that ends the last choice, or has an error.
        """
        if self.done:
            return
        self._is_silent = False
        if not self._items or self._items[-1] is not delta:
            self._items.append(delta)
        if delta.finish_reason is not None:
            self.num_open -= 1
            self.done = self.num_open == 0 or delta.finish_reason == "error"
        self._wake()

    def fail(self, error: ServingError) -> None:
        """End the stream with an exception, which the consumer gets after all deltas."""
        if not self.done:
            self._items.append(error)
            self.close()

    def close(self) -> None:
        """Send nothing more."""
        self.done = True
        self._wake()

    def keep_alive(self) -> None:
        """Give the consumer an empty delta if none has come since the last call."""
        if self._is_silent and not self.done and not self._items:
            self._items.append(TokenDelta())
            self._wake()
        self._is_silent = True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
