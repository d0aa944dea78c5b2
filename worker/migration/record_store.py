"""The boundary store as a worker uses it: records in place of bytes, and each operation in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from worker.errors import BoundaryStoreUnavailable
from worker.migration.boundary import Boundary
from worker.migration.store import BoundaryStore, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 2.0
"""Longest that one operation of the store may take."""

_PARTS = 8
"""Parts in which that time passes. However long the process is stopped, one of them passes then,
and the operation has the others to be seen to have ended.
"""


class RecordStore:
    """Reads and writes records, counts failures, and logs when they begin and end.

    Args:
        store: Store of the bytes.

    Attributes:
        num_failures: Operations that failed, and records that could not be read.
    """

    def __init__(self, store: BoundaryStore) -> None:
        self.num_failures = 0
        self._store = store
        self._is_down = False

    async def open(self) -> None:
        """See `BoundaryStore.open`."""
        await self._store.open()

    async def close(self) -> None:
        """See `BoundaryStore.close`."""
        await self._store.close()

    async def read(self, key: str) -> Boundary | None:
        """The record under a key, None if there is none.

        Raises:
            BoundaryStoreUnavailable: the store does not answer; or the record is damaged, or
                another version's: whether its request is a continuation, and where its answer
                begins, cannot be told.
        """
        try:
            data = await self._in_time(self._store.get(key))
        except StoreError as error:
            raise BoundaryStoreUnavailable(f"the boundary store {error}") from None
        try:
            return None if data is None else Boundary.decode(data)
        except ValueError as error:
            self.num_failures += 1
            raise BoundaryStoreUnavailable(
                f"the boundary store {self._store.address}: a record cannot be read: {error}"
            ) from None

    async def write(self, key: str, record: Boundary) -> None:
        """Write a record. Raises `StoreError`."""
        await self._in_time(self._store.put(key, record.encode()))

    async def write_again(self, key: str, record: Boundary) -> None:
        """Write a record again, and anew where the store has lost it; not if another worker has
        taken the request over. Raises `StoreError`.
        """
        found = await self._newest(key)
        if found is None or found.owner == record.owner:
            await self.write(key, record)

    async def update(self, key: str, owner: str, change: Callable[[Boundary], Boundary | None]) -> None:
        """Change the record that `owner` wrote, unless another worker has taken the request over.

        Args:
            key: Key of the record.
            owner: The expected owner.
            change: Returns the record's replacement, None to delete it.

        Raises:
            StoreError: the store does not answer.
        """
        found = await self._newest(key)
        if found is None or found.owner != owner:
            return
        changed = change(found)
        if changed is None:
            await self._in_time(self._store.delete(key))
        else:
            await self.write(key, changed)

    async def _newest(self, key: str) -> Boundary | None:
        """The record under a key; None if there is none, or none that can be read."""
        data = await self._in_time(self._store.get(key))
        try:
            return None if data is None else Boundary.decode(data)
        except ValueError as error:
            logger.warning("a record of the boundary store is not one of this worker's: %s", error)
            return None

    async def _in_time(self, operation: Awaitable[T]) -> T:
        """The operation's result, within `TIMEOUT_S`. Raises `StoreError`."""
        task = asyncio.ensure_future(operation)
        try:
            for _ in range(_PARTS):
                await asyncio.wait({task}, timeout=TIMEOUT_S / _PARTS)
                if task.done():
                    break
            else:
                raise TimeoutError
            result = task.result()
        except (TimeoutError, StoreError) as error:
            self.num_failures += 1
            silent = StoreError(f"{self._store.address}: does not answer within {TIMEOUT_S:g} s")
            problem = error if isinstance(error, StoreError) else silent
            if not self._is_down:
                logger.error("requests are refused: the boundary store %s", problem)
            self._is_down = True
            raise problem from None
        finally:
            task.cancel()
        if self._is_down:
            logger.warning("the boundary store answers again")
        self._is_down = False
        return result
