"""The thread in which the store does its work, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from worker.frontdoor.batches.store import Store
from worker.frontdoor.batches.stored_batches import StoredBatches
from worker.frontdoor.batches.stored_files import StoredFiles

P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    """A store, whose methods run one after the other, in the order in which they were called.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "front-door-batches")

    @property
    def files(self) -> StoredFiles:
        """The files; what reads or writes the database goes through `do`."""
        return self._store.files

    @property
    def batches(self) -> StoredBatches:
        """The batches; all of it goes through `do`."""
        return self._store.batches

    @property
    def store(self) -> Store:
        """The store; what reads or writes the database goes through `do`."""
        return self._store

    async def do(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a method of the store. It is not undone if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(method, *args, **kwargs))

    async def close(self) -> None:
        """Let what has begun end, and give the directory back."""
        await self.do(self._store.close)
        self._thread.shutdown(wait=False)
