"""`Interruptible`: work for a request that another task may end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Call in the event loop; the garbage collector closes dropped streams in any thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call, *arguments)
    else:
        call(*arguments)


class Interruptible:
    """Runs the work of one request before the engine has it, one coroutine at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._reason: Exception | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; raises the reason if `interrupt` ends it."""
        reason: Exception | None = None
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._task = task
        try:
            await asyncio.wait([task])
            reason, self._reason = self._reason, None
            if reason is not None:
                raise reason
            return task.result()
        finally:
            self._task = None
            call_in(self._loop, task.cancel)  # it may not be done: the request may have been cancelled
            del task, reason  # an exception's traceback has this frame: the request would stay

    def interrupt(self, reason: Exception) -> bool:
        """End the work under way with ``reason``, if it is the first; whether there is any."""
        if self._task is None:
            return False
        self._reason = self._reason or reason
        self._task.cancel()
        return True
