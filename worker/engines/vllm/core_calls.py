"""`CoreCalls`: calls of vLLM's processes that end with its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class CoreCalls:
    """Waits for answers of vLLM's processes; vLLM itself lets a call wait for ever whose engine
    dies before the answer. One event loop only.
    """

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._ends: set[asyncio.Future[None]] = set()

    def fail(self, failure: Exception) -> None:
        """End all calls, those to come too, with an exception; the first one counts."""
        self._failure = self._failure or failure
        for end in self._ends:
            if not end.done():
                end.set_result(None)

    async def answer(self, call: Awaitable[T]) -> T:
        """Result of a call. Raises what `fail` was given if that comes first."""
        asked, end = asyncio.ensure_future(call), asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            if self._failure is None:
                await asyncio.wait((asked, end), return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None and not asked.done():
                raise self._failure
            return asked.result()
        finally:
            asked.cancel()
            self._ends.discard(end)
