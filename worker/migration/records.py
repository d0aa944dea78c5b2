"""This worker's records in the boundary store: read, written, renewed and removed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import TypeVar

from worker.arguments import Arguments
from worker.engines import EngineInfo
from worker.errors import BoundaryStoreUnavailable, InvalidRequest, PoisonRequest
from worker.migration.boundary import Boundary, continuation
from worker.migration.store import TTL_S, BoundaryStore, StoreError, make_store
from worker.requests.request import GenerationRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CRASHES = 2
"""Workers that may die with a request in flight before it is refused."""

TIMEOUT_S = 2.0
"""Longest that one operation of the store may take."""

LINGER_S = 10.0
"""How long the record of a request stays that has left its worker. The frontend may have cancelled
it, after a time-out, to migrate it; or the worker may die before the runtime has sent the end of
the answer.
"""


class BoundaryRecords:
    """Tells continuations from new requests, and keeps the records of those in flight here.

    Args:
        store: Not open yet.
        pool: What the workers that share records have in common, and others in the store have not.
        ttl_s: Of the store's records; those of requests in flight are written again in time.
        answering: On a prefill worker the pool of the workers that answer: a prefill ends long
            before the answer does, so only their records tell how much of it there is.

    Attributes:
        num_failures: Operations that the store failed.
        num_continued: Requests that were continuations.
        num_replayed_tokens: Tokens that those came with.
    """

    def __init__(self, store: BoundaryStore, pool: str, ttl_s: float = TTL_S, *, answering: str | None = None) -> None:
        self.num_failures = 0
        self.num_continued = 0
        self.num_replayed_tokens = 0
        self._store = store
        self._pool = pool
        self._answering = answering
        self._ttl_s = ttl_s
        self._worker = secrets.token_hex(8)
        self._numbers = count()
        self._live: set[BoundaryRecord] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_down = False
        self._numerics = self._kv_dtype = ""

    async def open(self) -> None:
        """Open the store. Raises `StartupError` if it is not configured as it can be used."""
        await self._store.open()
        self._in_background(self._renew_live)

    async def begin(self, request_id: str, request: GenerationRequest) -> BoundaryRecord:
        """The record of a request that is about to be served, with what the request is.

        Args:
            request_id: The runtime's.
            request: As parsed.

        Raises:
            BoundaryStoreUnavailable: the store cannot be read.
            PoisonRequest: `MAX_CRASHES` workers have died with it.
            InvalidRequest: it is a continuation, and this worker computes other bits than the one
                before.
        """
        key = self.key_of(request_id)
        for found_key, found in await self._found(request_id):
            previous = found if found_key == key else None
            if found.is_continued_by(request):
                _refuse_poison(found)
                self._refuse_other_bits(found)
                self.num_continued += 1
                self.num_replayed_tokens += len(request.prompt_token_ids) - found.prompt_length
                return BoundaryRecord(self, key, self._continuation(request, found), found.attempts, previous)
            if found.is_repeated_by(request):
                _refuse_poison(found)
                if request.params.seed is None:
                    request = replace(request, params=replace(request.params, seed=found.seed))
                return BoundaryRecord(self, key, request, found.attempts, previous)
        return BoundaryRecord(self, key, request)

    def computes(self, info: EngineInfo) -> None:
        """Note what the engine computes with, once it has started."""
        self._numerics, self._kv_dtype = info.made_by, info.kv_dtype

    def _refuse_other_bits(self, found: Boundary) -> None:
        difference = found.difference(self._numerics, self._kv_dtype)
        if difference is not None:
            raise InvalidRequest("request id", f"its answer cannot go on here: {difference}")

    async def _found(self, request_id: str) -> list[tuple[str, Boundary]]:
        """The records of a request: its own pool's, and on a prefill worker that of its answer."""
        pools = [self._pool] if self._answering is None else [self._pool, self._answering]
        keys = [_key(pool, request_id) for pool in pools]
        found = [(key, self._readable(await self._wanted(self._store.get(key)))) for key in keys]
        return [(key, one) for key, one in found if one is not None]

    def _readable(self, data: bytes | None) -> Boundary | None:
        """The record in `data`.

        Raises:
            BoundaryStoreUnavailable: it is damaged, or another version's: whether the request goes
                on, and where its answer begins, cannot be told.
        """
        try:
            return None if data is None else Boundary.decode(data)
        except ValueError as error:
            self.num_failures += 1
            raise BoundaryStoreUnavailable(
                f"the boundary store {self._store.address}: a record cannot be read: {error}"
            ) from None

    def _continuation(self, request: GenerationRequest, boundary: Boundary) -> GenerationRequest:
        """See `continuation`; a prefill worker is asked for one token more than there are."""
        if self._answering is not None:
            num_tokens = len(request.prompt_token_ids) - boundary.prompt_length + (request.params.max_tokens or 1)
            boundary = replace(boundary, max_tokens=num_tokens)
        return continuation(request, boundary)

    async def close(self) -> None:
        """Finish what is being written or removed, within `TIMEOUT_S`, and close the store."""
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        removals = [record.go() for record in self._live if record.has_ended]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*removals, return_exceptions=True), TIMEOUT_S)
        await self._store.close()

    def key_of(self, request_id: str) -> str:
        """Under which the record of a request is kept."""
        return _key(self._pool, request_id)

    def _owner(self) -> str:
        return f"{self._worker}-{next(self._numbers)}"

    async def _wanted(self, operation: Awaitable[T]) -> T:
        """What ``operation`` returns. Raises `BoundaryStoreUnavailable`."""
        try:
            return await self._answered(operation)
        except StoreError as error:
            raise BoundaryStoreUnavailable(f"the boundary store {error}") from None

    async def _answered(self, operation: Awaitable[T]) -> T:
        """What ``operation`` returns, within `TIMEOUT_S`. Raises `StoreError`."""
        try:
            result = await asyncio.wait_for(operation, TIMEOUT_S)
        except (TimeoutError, StoreError) as error:
            self.num_failures += 1
            silent = StoreError(f"{self._store.address}: does not answer within {TIMEOUT_S:g} s")
            problem = error if isinstance(error, StoreError) else silent
            if not self._is_down:
                logger.error("requests are refused: the boundary store %s", problem)
            self._is_down = True
            raise problem from None
        if self._is_down:
            logger.warning("the boundary store answers again")
        self._is_down = False
        return result

    async def _remove(self, key: str, owner: str) -> None:
        """Remove a record, unless another worker has taken the request over."""
        if await self._still_owns(key, owner) is not None:
            await self._answered(self._store.delete(key))

    async def _pass_on(self, key: str, owner: str) -> None:
        """Note that this worker lets go of a request in order, unless another has taken it over."""
        found = await self._still_owns(key, owner)
        if found is not None:
            passed_on = replace(found, attempts=found.attempts - 1)
            await self._answered(self._store.put(key, passed_on.encode()))

    async def _note_answered(self, key: str, owner: str) -> None:
        """Note that the answer has ended, unless another worker has taken the request over."""
        found = await self._still_owns(key, owner)
        if found is not None:
            await self._answered(self._store.put(key, replace(found, is_answered=True).encode()))

    async def _give_back(self, key: str, owner: str, previous: Boundary) -> None:
        """Write the record as it was, unless another worker has taken the request over."""
        if await self._still_owns(key, owner) is not None:
            await self._answered(self._store.put(key, previous.encode()))

    async def _still_owns(self, key: str, owner: str) -> Boundary | None:
        found = _decoded(await self._answered(self._store.get(key)))
        return found if found is not None and found.owner == owner else None

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(_awaited(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew_live(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            for record in list(self._live):
                await record.renew()


class BoundaryRecord:
    """One request in flight in this worker, and its record; `BoundaryRecords.begin` makes it.

    Once `write` has been called, one of the other verbs is called when the request leaves this
    worker: `remove` if it has ended, `linger` if it was cancelled, `pass_on` if it migrates in
    order, `abandon` if this worker breaks.

    Attributes:
        key: In the store.
        owner: Of the record.
        request: The request as its first worker received it, with the answer so far.
        has_ended: Whether the record is to go away.
    """

    def __init__(
        self,
        records: BoundaryRecords,
        key: str,
        request: GenerationRequest,
        num_crashes: int = 0,
        previous: Boundary | None = None,
    ) -> None:
        """``previous`` is the record that this one replaces."""
        self.key = key
        self.owner = records._owner()
        self.request = request
        self.has_ended = False
        self._records = records
        self._num_crashes = num_crashes
        self._previous = previous
        self._is_cancelled = False
        self._boundary: Boundary | None = None
        self._put: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None

    def write(self, seed: int) -> None:
        """Begin to write the record of the request, whose draws are made of ``seed``."""
        computed = self._records._numerics, self._records._kv_dtype
        self._boundary = Boundary.of(self.request, seed, self.owner, self._num_crashes + 1, *computed)
        self._put = asyncio.create_task(self._records._wanted(self._store_it()))
        self._put.add_done_callback(_retrieved)
        self._records._live.add(self)

    async def written(self) -> None:
        """Until the record is in the store: before the first token leaves this worker.

        Raises:
            BoundaryStoreUnavailable: it could not be written.
        """
        if self._put is not None:
            await asyncio.shield(self._put)
            self._put = None

    async def renew(self) -> None:
        """Write the record again, so that it does not go away; what fails is tried again later."""
        if not self.has_ended:
            self._renewal = asyncio.create_task(self._records._answered(self._store_it()))
            self._renewal.add_done_callback(_retrieved)
            await asyncio.wait([self._renewal])

    async def _store_it(self) -> None:
        assert self._boundary is not None
        if not self.has_ended:
            await self._records._store.put(self.key, self._boundary.encode())

    def remove(self) -> None:
        """The request has ended. Idempotent."""
        self._end()

    def linger(self) -> None:
        """The request was cancelled: it has ended, or the frontend is about to migrate it.

        Or it is served elsewhere: a worker that was stopped takes a request in that the frontend
        gave to another one long ago. So a record that this one replaced comes back.
        """
        self._is_cancelled = self._is_cancelled or not self.has_ended
        self._end()

    async def pass_on(self) -> None:
        """The request is about to migrate in order: this worker is none that died with it."""
        if self._boundary is None or self.has_ended:
            return
        self.abandon()
        with contextlib.suppress(StoreError):
            await self._settled()
            await self._records._pass_on(self.key, self.owner)

    def abandon(self) -> None:
        """The worker breaks: the record stays as it is, with this worker counted. Idempotent."""
        self.has_ended = True
        self._records._live.discard(self)

    def _end(self) -> None:
        if self._boundary is not None and not self.has_ended:
            self.has_ended = True
            self._records._in_background(self._go_away)

    async def _go_away(self) -> None:
        with contextlib.suppress(StoreError):  # its time to live ends it, too
            await self._settled()
            if not self._is_cancelled:
                # The answer of a prefill begins elsewhere; the records of that tell what it is.
                if self._records._answering is None:
                    await self._records._note_answered(self.key, self.owner)
                    await asyncio.sleep(LINGER_S)
            elif self._previous is None:
                await self._records._pass_on(self.key, self.owner)
                await asyncio.sleep(LINGER_S)
            await self.go()
        self._records._live.discard(self)

    async def go(self) -> None:
        """Remove the record, or make it what it was. Raises `StoreError`."""
        if self._is_cancelled and self._previous is not None:
            await self._records._give_back(self.key, self.owner, self._previous)
        else:
            await self._records._remove(self.key, self.owner)

    async def _settled(self) -> None:
        """Until nothing of the record is being written."""
        writing = [task for task in (self._put, self._renewal) if task is not None]
        if writing:
            await asyncio.wait(writing)


class UnrecordedRequest:
    """A request without a record: migration is off, or it is a health probe."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request

    def write(self, seed: int) -> None:
        """Nothing."""

    async def written(self) -> None:
        """Nothing."""

    def remove(self) -> None:
        """Nothing."""

    def linger(self) -> None:
        """Nothing."""

    async def pass_on(self) -> None:
        """Nothing."""

    def abandon(self) -> None:
        """Nothing."""


RequestRecord = BoundaryRecord | UnrecordedRequest


def records_of(arguments: Arguments) -> BoundaryRecords | None:
    """The records of a worker, None while ``--migration off``.

    Prefill workers have records of their own: a request runs there and on a decode worker. They
    read those of decode workers too.

    Raises:
        StartupError: the client library of the store is not installed.
    """
    if arguments.migration == "off":
        return None
    assert arguments.boundary_store is not None
    store, pool = make_store(arguments.boundary_store), [arguments.namespace, arguments.served_model_name]
    if arguments.disaggregation_mode == "prefill":
        return BoundaryRecords(store, json.dumps([*pool, "prefill"]), answering=json.dumps(pool))
    return BoundaryRecords(store, json.dumps(pool))


def _key(pool: str, request_id: str) -> str:
    return blake2b(f"{pool}\0{request_id}".encode(), digest_size=16).hexdigest()


def _refuse_poison(found: Boundary) -> None:
    if found.attempts >= MAX_CRASHES:
        raise PoisonRequest(found.attempts)


def _decoded(data: bytes | None) -> Boundary | None:
    try:
        return None if data is None else Boundary.decode(data)
    except ValueError as error:
        logger.warning("a record of the boundary store is not one of this worker's: %s", error)
        return None


def _retrieved(task: asyncio.Task[None]) -> None:
    """Nobody may be left to hear of a failure."""
    if not task.cancelled():
        task.exception()


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()  # made here: a task that is cancelled before it begins leaves no coroutine behind
