"""Thread in which large bodies are read and rewritten, beside the event loop.

A large body takes tenths of a second, for which every other client would wait. One at a time is in
a thread, of each client in turn, and those that wait for it are gone as soon as their clients are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from worker.frontdoor.errors import Refused
from worker.requests.client_turns import ClientTurns

AT_ONCE = 32 * 1024
"""Bytes of the largest body that the event loop reads itself: about a millisecond at worst."""

T = TypeVar("T")


class Rewriting:
    """Rewrites large bodies, one at a time, those of each client in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "front-door-bodies")
        self._turns = ClientTurns(1)

    async def by_size(self, client: bytes, size: int, rewrite: Callable[[], T]) -> T:
        """The result of ``rewrite``, which reads `size` bytes: at once, or else as `aside`."""
        return rewrite() if size <= AT_ONCE else await self.aside(client, rewrite)

    async def aside(self, client: bytes, rewrite: Callable[[], T]) -> T:
        """The result of ``rewrite``, for the client of a label. Raises `Refused` as that does."""
        result = await self._turns.in_thread(client, self._thread, partial(_run, rewrite))
        if isinstance(result, Refused):
            raise result
        return result

    def close(self) -> None:
        """End the thread: no more bodies come."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _run(rewrite: Callable[[], T]) -> T | Refused:
    # reading a million lists would set off a thousand collections, which hold the event loop up
    gc.disable()
    try:
        return rewrite()
    except Refused as refused:
        return refused
    finally:
        gc.enable()
