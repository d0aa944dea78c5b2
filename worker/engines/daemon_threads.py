"""Work beside an engine in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """The result of `work`, from a thread that no exit waits for, as it would for an executor's: it
    may be held for ever.
    """
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # the thread's outermost frame: the one who waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def done_in_time(name: str, work: Callable[[], T], timeout_s: float) -> T:
    """The result of `work`, from a thread of its own. Raises `TimeoutError` after `timeout_s`
    seconds, while the thread goes on.
    """
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(in_daemon_thread(name, work))
