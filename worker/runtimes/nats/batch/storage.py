"""A worker's records of batches in JetStream, however badly the server does."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import (
    MaxPayloadError,
    NoRespondersError,
)
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
)
from nats.js.kv import KeyValue

from worker.errors import InvalidRequest, log_text
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.layout import QueuedRequest
from worker.runtimes.nats.batch.objects import ensure_bucket, get_object, put_object
from worker.runtimes.nats.batch.patience import PatientServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BUCKETS = 64
"""Buckets of results that are kept at hand."""


async def ensure_dead_letters(js: JetStreamContext) -> None:
    """The stream of requests that were set aside exists; one that is there keeps its limits."""
    try:
        await js.stream_info(layout.DEAD_LETTERS)
    except NotFoundError:
        with contextlib.suppress(BadRequestError):  # made just now
            await js.add_stream(StreamConfig(name=layout.DEAD_LETTERS, subjects=[layout.DEAD_LETTER_SUBJECT]))


class BatchStorage:
    """Results, attempts, large bodies and dead letters.

    Every call waits while the server is away or fails everybody, and raises errors that concern
    this call alone: a slot is never held for an error that will not pass.

    Args:
        client: Connection to NATS with JetStream.

    Attributes:
        server: The server, with the calls that it has not done.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._buckets: OrderedDict[str, KeyValue] = OrderedDict()
        self.server = PatientServer(client)

    @property
    def js(self) -> JetStreamContext:
        return self.server.js

    async def acknowledge(self, message: Msg) -> None:
        """Take a message from its queue."""

        async def acknowledge() -> None:
            if not message.is_acked:
                with contextlib.suppress(NoRespondersError):  # its queue was deleted
                    await message.ack_sync(timeout=2)

        await self.server.patiently(acknowledge)

    async def end(self, message: Msg) -> None:
        """Take a message that is not to be tried again from its queue, without a confirmation."""

        async def end() -> None:
            if not message.is_acked:
                await message.term()

        await self.server.patiently(end)

    async def body(self, digest: str) -> Any:
        """A large body.

        Raises:
            InvalidRequest: it is not there any more, or not what was submitted.
        """
        try:
            data = await self.server.patiently(lambda: get_object(self.js, digest))
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

        return await self.server.patiently(look)

    async def write_result(self, request: QueuedRequest, line: dict[str, Any]) -> None:
        """Write the result of a request, unless it has one."""
        value = protocol.encoded({"index": request.index, "line": line})
        if len(value) >= layout.large_bytes(self._client.max_payload):
            whole = value
            name = await self.server.patiently(lambda: put_object(self.js, whole))
            value = protocol.encoded({"object": name})

        async def create() -> None:
            try:
                await (await self._results(request.batch)).create(request.key, value)
            except KeyWrongLastSequenceError:  # answered already: by another worker, or just now
                pass
            except NoStreamResponseError:
                self._buckets.pop(request.batch, None)  # it was deleted
                raise

        await self.server.patiently(create)

    async def _results(self, batch: str) -> KeyValue:
        bucket = self._buckets.get(batch)
        if bucket is None:
            bucket = self._buckets[batch] = await ensure_bucket(self.js, layout.results_bucket(batch))
            while len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(batch)
        return bucket

    async def returns(self, request: QueuedRequest) -> int:
        """Number of times that a request came back without a failure."""
        return await self.server.patiently(lambda: self._returns(request))

    async def _returns(self, request: QueuedRequest) -> int:
        try:
            entry = await (await ensure_bucket(self.js, layout.RETURNS)).get(f"{request.batch}.{request.key}")
        except KeyNotFoundError:
            return 0
        text = (entry.value or b"").decode(errors="replace")
        return int(text) if text.isdecimal() and len(text) < 10 else 0

    async def hand_back(self, message: Msg, request: QueuedRequest, delay_s: float) -> None:
        """Return a message to its queue; it counts as an attempt only if the note of it fails."""
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            bucket = await ensure_bucket(self.js, layout.RETURNS)
            number = await self._returns(request)
            await bucket.put(f"{request.batch}.{request.key}", str(number + 1).encode())
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await message.nak(delay_s)

    async def set_aside(self, message: Msg, reason: str) -> None:
        """Copy a request to the dead letters; the message stays in its queue."""
        logger.error("batches: a request was set aside in %s: %s", layout.DEAD_LETTERS, log_text(reason))
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
            await self.server.patiently(publish)
