"""The loading of vLLM, which takes minutes and can be ended: the library cannot be interrupted, but
the processes that it starts can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from worker.errors import StartupError
from worker.parent_watch import parent_of

T = TypeVar("T")


class Loading:
    """The start of an engine, which a signal can end."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._others: frozenset[int] | None = None  # children of before, while a start is not complete

    async def run(self, start: Coroutine[Any, Any, T]) -> T:
        """The result of ``start``, whose blocking calls are in threads that no exit waits for.

        Raises:
            StartupError: `stop` was called meanwhile.
        """
        self._others = _children()
        starting = asyncio.ensure_future(start)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise StartupError("the worker was told to stop while vLLM was loading")
            found = starting.result()
        finally:
            stopped.cancel()
            starting.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
        self._others = None
        return found

    def stop(self) -> None:
        """End a start that is not complete, and kill the processes that it has started."""
        self._stopped.set()
        if self._others is not None:
            for pid in _descendants(_children() - self._others):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _children() -> frozenset[int]:
    return frozenset(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def _descendants(pids: Iterable[int]) -> set[int]:
    """Processes and all below them, as far as the system says."""
    found = set(pids)
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


async def stop_reading(llm: Any) -> None:
    """End vLLM's task that reads outputs: it would log the end of the processes as an error.

    Args:
        llm: The ``AsyncLLM``, None where none was loaded.
    """
    reading = getattr(llm, "output_handler", None)
    if reading is not None:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
