"""Changes that are made to their end, though those who asked for them may leave meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class WholeChanges:
    """Makes changes that must not stop half-way. One event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def made(self, change: Coroutine[Any, Any, T]) -> T:
        """The result of a change; raises what it raises. A caller that is cancelled gets none, and
        the change goes on.
        """
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def ended(self) -> None:
        """Wait until every change has been made, or has failed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
