"""This worker's records in the boundary store: begun, renewed, and removed when it closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from itertools import count

from worker.arguments import Arguments
from worker.engines import EngineInfo
from worker.errors import InvalidRequest, PoisonRequest
from worker.migration.boundary import Boundary, continuation, owner_of
from worker.migration.boundary_record import BoundaryRecord
from worker.migration.named_store import make_store
from worker.migration.record_store import TIMEOUT_S, RecordStore
from worker.migration.store import TTL_S, BoundaryStore
from worker.requests.continuation import CANNOT_GO_ON
from worker.requests.request import GenerationRequest

MAX_CRASHES = 2
"""Workers that may die with a request in flight before it is refused."""


class BoundaryRecords:
    """Tells continuations from new requests, and keeps the records of those in flight here.

    Args:
        store: Store of the records, not open yet.
        pool: Name that the workers that share records have in common, and others do not.
        ttl_s: Time to live of the store's records; those of requests in flight are renewed in time.
        answering: Pool of the workers that answer, on a prefill worker, else None. A prefill ends
            long before the answer does, so only their records tell how much of it there is.

    Attributes:
        num_continued: Requests that were continuations.
        num_replayed_tokens: Tokens that those came with.
    """

    def __init__(self, store: BoundaryStore, pool: str, ttl_s: float = TTL_S, *, answering: str | None = None) -> None:
        self.num_continued = 0
        self.num_replayed_tokens = 0
        self._store = RecordStore(store)
        self._pool = pool
        self._answering = answering
        self._ttl_s = ttl_s
        self._worker = secrets.token_hex(8)
        self._numbers = count()
        self._live: set[BoundaryRecord] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._numerics = self._kv_dtype = self._model = ""
        self._context_length: int | None = None
        self._weights: Callable[[], str] = str

    @property
    def num_failures(self) -> int:
        """Operations that the store failed."""
        return self._store.num_failures

    async def open(self) -> None:
        """Open the store. Raises `StartupError` if it cannot be used as configured."""
        await self._store.open()
        self._renewing = asyncio.create_task(self._renew_live())

    def computes(self, info: EngineInfo, weights: Callable[[], str] = str, model: str = "") -> None:
        """Note what the engine computes with, once it has started.

        Args:
            info: The engine, which has numerics and a KV type.
            weights: Returns `WeightVersion.updated_digest` of its weights now.
            model: Digest of the checkpoint that it has loaded, empty if there is none.
        """
        self._numerics, self._kv_dtype, self._weights, self._model = info.made_by, info.kv_dtype, weights, model
        self._context_length = info.context_length

    async def begin(self, request_id: str, request: GenerationRequest) -> BoundaryRecord:
        """The record of a request that is about to be served, with the request that it is.

        Args:
            request_id: The runtime's id.
            request: The request as parsed.

        Raises:
            BoundaryStoreUnavailable: the store cannot be read.
            PoisonRequest: `MAX_CRASHES` workers have died with it.
            InvalidRequest: it is a continuation, and this worker would give another answer than the
                one before.
        """
        key = self.key_of(request_id, request.lora_name)
        for found_key, found in await self._found(request_id, request.lora_name):
            if not (is_continued := found.is_continued_by(request)) and not found.is_repeated_by(request):
                continue
            if found.attempts >= MAX_CRASHES:
                raise PoisonRequest(found.attempts)
            if is_continued:
                request = self._continuation(request, found)
            elif request.params.seed is None:
                request = replace(request, params=replace(request.params, seed=found.seed))
            return self._record(key, request, found.attempts, found if found_key == key else None)
        return self._record(key, request)

    def key_of(self, request_id: str, lora_name: str | None = None) -> str:
        """Key of the record of a request, to the model or to an adapter, in the store."""
        return _key(self._pool, request_id, lora_name)

    async def close(self) -> None:
        """Remove the records of ended requests, within `TIMEOUT_S`, and close the store."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        removals = [record.close() for record in self._live]
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*removals, return_exceptions=True)
        await self._store.close()

    async def _found(self, request_id: str, lora_name: str | None) -> list[tuple[str, Boundary]]:
        """The records of a request: its own pool's, and on a prefill worker that of its answer."""
        pools = [self._pool] if self._answering is None else [self._pool, self._answering]
        keys = [_key(pool, request_id, lora_name) for pool in pools]
        found = [(key, await self._store.read(key)) for key in keys]
        return [(key, one) for key, one in found if one is not None]

    def _continuation(self, request: GenerationRequest, found: Boundary) -> GenerationRequest:
        """See `continuation`; a prefill worker is asked for one token more than there are."""
        ours = (self._numerics, self._kv_dtype, self._weights(), request.beside_model, self._model, request.controls)
        difference = found.difference(*ours)
        if difference is None and self._answering is None and self._context_length is not None:
            difference = _shortened(found, self._context_length)
        if difference is not None:
            raise InvalidRequest("request id", f"{CANNOT_GO_ON}: {difference}")
        num_generated = len(request.prompt_token_ids) - found.prompt_length
        self.num_continued += 1
        self.num_replayed_tokens += num_generated
        if self._answering is not None:
            found = replace(found, max_tokens=num_generated + (request.params.max_tokens or 1))
        return continuation(request, found)

    def _record(
        self, key: str, request: GenerationRequest, num_crashes: int = 0, previous: Boundary | None = None
    ) -> BoundaryRecord:
        owner = owner_of(f"{self._worker}-{next(self._numbers)}", self._model, request.controls)
        draft = Boundary.of(request, 0, owner, num_crashes + 1, self._numerics, self._kv_dtype, self._weights())
        answers = self._answering is None
        return BoundaryRecord(self._store, self._live, key, request, draft, previous, answers=answers)

    async def _renew_live(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            for record in list(self._live):
                await record.renew()


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


def _shortened(found: Boundary, context_length: int) -> str | None:
    """The difference of a worker whose context has no room for the whole answer; None if it has."""
    room = context_length - found.prompt_length
    if found.max_tokens <= room:
        return None
    return f"max_tokens is {found.max_tokens} on the worker that began the answer and at most {room} on this one"


def _key(pool: str, request_id: str, lora_name: str | None) -> str:
    model = pool if lora_name is None else json.dumps([pool, lora_name])
    return blake2b(f"{model}\0{request_id}".encode(), digest_size=16).hexdigest()
