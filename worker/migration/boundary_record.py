"""The record of one request in flight: written before its first token, gone after its last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from worker.errors import BoundaryStoreUnavailable
from worker.migration.boundary import Boundary
from worker.migration.record_store import RecordStore
from worker.migration.store import StoreError
from worker.requests.request import GenerationRequest

EXPIRY_S = 10.0
"""Seconds that a record stays after its request has left the worker. The frontend may have
cancelled the request, after a time-out, to migrate it; or the worker may die before the runtime has
sent the end of the answer.
"""


class BoundaryRecord:
    """One request in flight in this worker, and its record; `BoundaryRecords.begin` makes it.

    Once `write` has been called, one more verb is called when the request leaves this worker:
    `settle` if it has ended, `expire` if it was cancelled, `release` if it migrates in order,
    `drop` if this worker breaks.

    Args:
        store: Store of the record.
        live: The worker's records that are in the store; this one is, from `write` on.
        key: Key of the record.
        request: The request as its first worker received it, with the answer so far.
        draft: The record, but for the seed.
        previous: The record that this one replaces, None if it is the first under its key.
        answers: Whether this worker generates the answer; a prefill worker does not, and its record
            goes away at once.

    Attributes:
        request: The same.
        has_ended: Whether the request has left this worker.
    """

    def __init__(
        self,
        store: RecordStore,
        live: set[BoundaryRecord],
        key: str,
        request: GenerationRequest,
        draft: Boundary,
        previous: Boundary | None,
        *,
        answers: bool,
    ) -> None:
        self.request = request
        self.has_ended = False
        self._store = store
        self._live = live
        self._key = key
        self._draft = draft
        self._previous = previous
        self._answers = answers
        self._is_cancelled = False
        self._written: Boundary | None = None
        self._first_put: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._removal: asyncio.Task[None] | None = None

    def write(self, seed: int) -> None:
        """Begin to write the record of the request, whose random numbers are made of ``seed``."""
        self._written = replace(self._draft, seed=seed)
        self._first_put = self._put(self._store.write, self._written)
        self._live.add(self)

    def sampled_from(self, weights: str) -> None:
        """Begin to write the record again if the next token is of other weights than those in it.

        Args:
            weights: See `Boundary.weights`.
        """
        written = self._written
        if written is not None and not self.has_ended and written.weights != weights:
            self._written = replace(written, weights=weights)
            self._first_put = self._put(self._store.write_again, self._written, self._first_put, self._renewal)

    async def wait_written(self) -> None:
        """Wait until the record is in the store: before a token of its weights leaves this worker.

        Raises:
            BoundaryStoreUnavailable: it could not be written.
        """
        if self._first_put is not None:
            try:
                await asyncio.shield(self._first_put)
            except StoreError as error:
                raise BoundaryStoreUnavailable(f"the boundary store {error}") from None
            self._first_put = None

    async def renew(self) -> None:
        """Write the record again before its time to live ends; a failure is not raised.

        A worker that was stopped may come to it before it hears that the frontend has cancelled the
        request, and given it to another one: that one's record stays.
        """
        if self._written is not None and not self.has_ended:
            self._renewal = self._put(self._store.write_again, self._written)
            await asyncio.wait([self._renewal])

    def settle(self) -> None:
        """The request has ended: the record goes away once the answer has been sent. Idempotent."""
        if self._written is not None and not self.has_ended:
            self.has_ended = True
            self._removal = asyncio.create_task(self._remove_later())

    def expire(self) -> None:
        """The request was cancelled: it has ended, or the frontend is about to migrate it.

        Or it is served elsewhere: a worker that was stopped takes a request in that the frontend
        gave to another one long ago. So a record that this one replaced comes back.
        """
        self._is_cancelled = self._is_cancelled or not self.has_ended
        self.settle()

    async def release(self) -> None:
        """The request is about to migrate in order: this worker is none that died with it."""
        if self._written is not None and not self.has_ended:
            self.drop()
            with contextlib.suppress(StoreError):
                await _finished(self._first_put, self._renewal)
                await self._store.update(self._key, self._draft.owner, _released)

    def drop(self) -> None:
        """The worker breaks: the record stays as it is, with this worker counted. Idempotent."""
        self.has_ended = True
        self._live.discard(self)

    async def close(self) -> None:
        """Remove the record at once if its request has ended. Raises `StoreError`."""
        if self._removal is not None:
            self._removal.cancel()
            await _finished(self._removal)
        if self.has_ended:
            await self._remove()

    def _put(
        self,
        write: Callable[[str, Boundary], Awaitable[None]],
        record: Boundary,
        before: asyncio.Task[None] | None = None,
        renewal: asyncio.Task[None] | None = None,
    ) -> asyncio.Task[None]:
        async def put() -> None:
            await _finished(renewal)  # with older weights it would come last
            if before is not None:
                await before  # a record of another worker that it did not replace would stay
            if not self.has_ended:
                await write(self._key, record)

        task = asyncio.create_task(put())
        task.add_done_callback(_retrieved)
        return task

    async def _remove_later(self) -> None:
        with contextlib.suppress(StoreError):  # its time to live ends it, too
            await _finished(self._first_put, self._renewal)
            owner = self._draft.owner
            if not self._is_cancelled:
                if self._answers:
                    await self._store.update(self._key, owner, lambda found: replace(found, is_answered=True))
                    await asyncio.sleep(EXPIRY_S)
            elif self._previous is None:
                await self._store.update(self._key, owner, _released)
                await asyncio.sleep(EXPIRY_S)
            await self._remove()
        self._live.discard(self)

    async def _remove(self) -> None:
        """Remove the record, or after a cancelled request restore the one that it replaced."""
        restored = self._previous if self._is_cancelled else None
        await self._store.update(self._key, self._draft.owner, lambda _: restored)


class UnrecordedRequest:
    """Stands for a `BoundaryRecord` where there is none: migration is off, or a health probe.

    Args:
        request: The request, as parsed.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request

    def write(self, seed: int) -> None:
        """Do nothing."""

    def sampled_from(self, weights: str) -> None:
        """Do nothing."""

    async def wait_written(self) -> None:
        """Return at once."""

    def settle(self) -> None:
        """Do nothing."""

    def expire(self) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""


RequestRecord = BoundaryRecord | UnrecordedRequest


def _released(record: Boundary) -> Boundary:
    """The record without this worker among those that may have died with the request."""
    return replace(record, attempts=record.attempts - 1)


async def _finished(*tasks: asyncio.Task[None] | None) -> None:
    """Wait for tasks, however they end."""
    begun = [task for task in tasks if task is not None]
    if begun:
        await asyncio.wait(begun)


def _retrieved(task: asyncio.Task[None]) -> None:
    """Mark a failure as seen; asyncio would log one that no caller awaits."""
    if not task.cancelled():
        task.exception()
