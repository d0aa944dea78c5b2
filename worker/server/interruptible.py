"""`Interruptible`: work for a request that another task may end; `InPreparation`: all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from worker.engines import FinishReason

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


class Aborted(Exception):
    """A request ends before it reaches the engine: its client is gone, an operator aborts it, or
    its deadline has come.

    Args:
        finish_reason: Reason for the end of its answer.
    """

    def __init__(self, finish_reason: FinishReason = "cancelled") -> None:
        super().__init__(finish_reason)
        self.finish_reason = finish_reason


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

    @contextmanager
    def until(self, deadline: float | None) -> Iterator[None]:
        """Interrupt what is under way at a request's deadline, in seconds since 1970."""
        if deadline is None:
            yield
            return
        left_s = max(0.0, deadline - time.time())
        timer = self._loop.call_later(left_s, self.interrupt, Aborted("length"))
        try:
            yield
        finally:
            timer.cancel()


class InPreparation:
    """Requests that are prepared, which the engine does not know of yet. One event loop only."""

    def __init__(self) -> None:
        self._by_id: dict[str, Interruptible] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def holding(self, request_id: str, preparing: Interruptible) -> Iterator[None]:
        """Have a request among them; a new one may take its id before it has left."""
        self._by_id[request_id] = preparing
        try:
            yield
        finally:
            if self._by_id.get(request_id) is preparing:
                del self._by_id[request_id]

    def interrupt(self, request_id: str, reason: Exception) -> None:
        """End the preparation of a request. Ignores unknown ids."""
        if request_id in self._by_id:
            self._by_id[request_id].interrupt(reason)

    def interrupt_all(self, reason: Exception) -> int:
        """End every preparation; returns how many there were."""
        return sum([each.interrupt(reason) for each in self._by_id.values()])
