"""A worker's records of batches in JetStream, however badly the server does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import (
    ConnectionClosedError,
    ConnectionReconnectingError,
    MaxPayloadError,
    NoRespondersError,
    OutboundBufferLimitError,
    StaleConnectionError,
)
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import (
    BadObjectMetaError,
    BadRequestError,
    DigestMismatchError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
    NotFoundError,
    ServerError,
    ServiceUnavailableError,
)
from nats.js.kv import KeyValue

from worker.errors import InvalidRequest
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.layout import QueuedRequest
from worker.runtimes.nats.batch.loops import PASSES_S, RETRY_S
from worker.runtimes.nats.batch.objects import ensure_bucket, get_object, put_object

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
"""Seconds after which a server that answers others must have answered a request's call."""

MAX_BUCKETS = 64
"""Buckets of results that are kept at hand."""

_PASSING = (
    *(TimeoutError, OSError, NoRespondersError, NoStreamResponseError, ServiceUnavailableError, ServerError),
    *(ConnectionClosedError, ConnectionReconnectingError, OutboundBufferLimitError, StaleConnectionError),
)
"""Errors of a server that is away, or has no room; all others are about what was asked."""


async def ensure_dead_letters(js: JetStreamContext) -> None:
    """The stream of requests that were set aside exists; one that is there keeps its limits."""
    try:
        await js.stream_info(layout.DEAD_LETTERS)
    except NotFoundError:
        with contextlib.suppress(BadRequestError):  # made just now
            await js.add_stream(StreamConfig(name=layout.DEAD_LETTERS, subjects=[layout.DEAD_LETTER_SUBJECT]))


class BatchStorage:
    """Results, attempts, large bodies and dead letters.

    Every call waits while the server is away or fails everybody, and raises what is about this call
    alone: a slot is never held for what will not pass.

    Args:
        client: To NATS with JetStream.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._buckets: OrderedDict[str, KeyValue] = OrderedDict()
        self._failing: dict[int, tuple[float, str]] = {}
        self._calls = count()

    @property
    def problem(self) -> str | None:
        """A call that the server has not done for a while, None if it does everything."""
        now_s = time.monotonic()
        return next((text for since_s, text in self._failing.values() if now_s - since_s > PASSES_S), None)

    @property
    def js(self) -> JetStreamContext:
        return self._client.jetstream(timeout=5)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """``call``, again while the server cannot do it, nor anything else.

        Raises:
            NatsError: the server refuses it, or fails it for `PATIENCE_S` and does other things.
            TimeoutError: the same.
        """
        number = next(self._calls)
        try:
            while True:
                try:
                    return await call()
                except _PASSING as error:
                    if await self._is_over(number, error):
                        raise
                    await asyncio.sleep(RETRY_S)
        finally:
            self._failing.pop(number, None)

    async def _is_over(self, number: int, error: BaseException) -> bool:
        """Whether a call that has just failed is not to be tried again."""
        logger.debug("batches: again after %r", error)
        if self._client.is_closed:
            return True
        if not self._client.is_connected:
            self._failing.pop(number, None)
            return False
        now_s, text = time.monotonic(), f"batches: {str(error) or type(error).__name__}"
        since_s, _ = self._failing.setdefault(number, (now_s, text))
        return now_s - since_s > PATIENCE_S and await self._does_other_things()

    async def _does_other_things(self) -> bool:
        try:
            await (await ensure_bucket(self.js, layout.RETURNS)).put("probe", b"")
        except (NatsError, TimeoutError, OSError):
            return False
        return True

    async def acknowledge(self, message: Msg) -> None:
        """The server does not deliver the message again."""

        async def acknowledge() -> None:
            if not message.is_acked:
                with contextlib.suppress(NoRespondersError):  # its queue was deleted
                    await message.ack_sync(timeout=2)

        await self.patiently(acknowledge)

    async def end(self, message: Msg) -> None:
        """The same, without an answer of the server's: for what is not to be tried again."""

        async def end() -> None:
            if not message.is_acked:
                await message.term()

        await self.patiently(end)

    async def body(self, digest: str) -> Any:
        """A large body.

        Raises:
            InvalidRequest: it is not there any more, or not what was submitted.
        """
        try:
            data = await self.patiently(lambda: get_object(self.js, digest))
        except NotFoundError:
            raise InvalidRequest("body", "is not in the object store any more") from None
        except (BadObjectMetaError, DigestMismatchError):
            raise InvalidRequest("body", "was altered in the object store") from None
        try:
            return protocol.decoded(data)
        except protocol.Malformed as error:
            raise InvalidRequest("body", str(error)) from None

    async def has_result(self, request: QueuedRequest) -> bool:
        """Whether a request was answered."""

        async def look() -> bool:
            try:
                await (await self._results(request.batch)).get(request.key)
            except KeyNotFoundError:
                return False
            except (NoRespondersError, NotFoundError):
                self._buckets.pop(request.batch, None)  # it was deleted
                raise
            return True

        return await self.patiently(look)

    async def write_result(self, request: QueuedRequest, line: dict[str, Any]) -> None:
        """The result of a request, unless it has one."""
        value = protocol.encoded({"index": request.index, "line": line})
        if len(value) >= layout.large_bytes(self._client.max_payload):
            whole = value
            name = await self.patiently(lambda: put_object(self.js, whole))
            value = protocol.encoded({"object": name})

        async def create() -> None:
            try:
                await (await self._results(request.batch)).create(request.key, value)
            except KeyWrongLastSequenceError:  # answered already: by another worker, or just now
                pass
            except NoStreamResponseError:
                self._buckets.pop(request.batch, None)  # it was deleted
                raise

        await self.patiently(create)

    async def _results(self, batch: str) -> KeyValue:
        bucket = self._buckets.get(batch)
        if bucket is None:
            bucket = self._buckets[batch] = await ensure_bucket(self.js, layout.results_bucket(batch))
            while len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(batch)
        return bucket

    async def returns(self, request: QueuedRequest) -> int:
        """How often a request came back without a failure."""
        return await self.patiently(lambda: self._returns(request))

    async def _returns(self, request: QueuedRequest) -> int:
        try:
            entry = await (await ensure_bucket(self.js, layout.RETURNS)).get(f"{request.batch}.{request.key}")
        except KeyNotFoundError:
            return 0
        text = (entry.value or b"").decode(errors="replace")
        return int(text) if text.isdecimal() and len(text) < 10 else 0

    async def hand_back(self, message: Msg, request: QueuedRequest, delay_s: float) -> None:
        """Back into the queue, without counting as an attempt; if that fails it counts as one."""
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            bucket = await ensure_bucket(self.js, layout.RETURNS)
            number = await self._returns(request)
            await bucket.put(f"{request.batch}.{request.key}", str(number + 1).encode())
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await message.nak(delay_s)

    async def set_aside(self, message: Msg, reason: str) -> None:
        """A copy of a request among the dead letters; the message stays in its queue."""
        logger.error("batches: a request was set aside in %s: %s", layout.DEAD_LETTERS, reason)
        place = message.metadata
        headers = {
            "Dlw-Reason": protocol.header_text(reason),
            "Nats-Msg-Id": f"{place.stream}/{place.sequence.stream}",
        }

        async def publish() -> None:
            data = message.data[: max(0, self._client.max_payload - layout.HEADERS_BYTES)]
            if len(data) < len(message.data):
                headers["Dlw-Truncated"] = str(len(message.data))
            try:
                await self.js.publish(layout.DEAD_LETTER_SUBJECT, data, headers=headers)
            except NoStreamResponseError:
                await ensure_dead_letters(self.js)
                raise

        with contextlib.suppress(MaxPayloadError):  # of a server that takes next to nothing
            await self.patiently(publish)
