"""The client side of batches: submit, look at, collect, cancel."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ObjectMeta, ObjectMetaOptions
from nats.js.errors import (
    BucketNotFoundError,
    DigestMismatchError,
    KeyNotFoundError,
    NotFoundError,
    ObjectNotFoundError,
)
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from worker.errors import ConfigurationError
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.layout import BatchRecord, QueuedRequest
from worker.runtimes.nats.batch.queues import ensure_queue

PUBLISHED_AT_ONCE = 64

CHUNK_BYTES = 128 * 2**10
"""Of an object, at most; less where the server's messages are small."""

OBJECT_S = 60.0
"""Seconds for an object to arrive."""

READ_TIMEOUT_S = 10.0
"""For one answer of the server."""

Line = dict[str, Any]


class MalformedLine(ConfigurationError):
    """A line of a batch file is no request; the message has its number."""


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """How far a batch is.

    Attributes:
        record: What was submitted.
        num_answered: Requests with a result, be it an error.
        num_failed: Those whose result is an error; None where they were not counted.
    """

    record: BatchRecord
    num_answered: int
    num_failed: int | None = None

    @property
    def state(self) -> str:
        """``submitting``, ``in_progress``, ``completed`` or ``cancelled``."""
        if self.record.cancelled:
            return "cancelled"
        if not self.record.num_requests:
            return "submitting"
        return "completed" if self.num_answered >= self.record.num_requests else "in_progress"


def read_lines(lines: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """``custom_id``, ``url`` and ``body`` of each request of a file in OpenAI's batch format.

    Raises:
        MalformedLine: naming the line and what was expected.
    """
    seen: set[str] = set()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = protocol.decoded(text.encode())
        except protocol.Malformed as error:
            raise MalformedLine(f"line {number}: {error}") from None
        yield _checked(number, line, seen)


def _checked(number: int, line: Line, seen: set[str]) -> tuple[str, str, Any]:
    custom_id, url = line.get("custom_id"), line.get("url")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= layout.MAX_CUSTOM_ID:
        raise MalformedLine(f"line {number}: custom_id must be a text of 1 to {layout.MAX_CUSTOM_ID} characters")
    if custom_id in seen:
        raise MalformedLine(f"line {number}: custom_id {custom_id[:60]!r} occurs twice")
    seen.add(custom_id)
    if url not in layout.URLS:
        raise MalformedLine(f"line {number}: url must be one of {', '.join(layout.URLS)}")
    if line.get("method", "POST") != "POST":
        raise MalformedLine(f"line {number}: method must be POST")
    unknown = sorted(set(line) - {"custom_id", "url", "method", "body"})
    if unknown:
        raise MalformedLine(f"line {number}: unknown field {unknown[0][:60]!r}")
    return custom_id, str(url), line.get("body")


async def ensure_bucket(js: JetStreamContext, bucket: str) -> KeyValue:
    """A bucket of keys and values that exists."""
    try:
        return await js.key_value(bucket)
    except BucketNotFoundError:
        return await js.create_key_value(bucket=bucket)


async def ensure_bodies(js: JetStreamContext) -> ObjectStore:
    """The object store of large bodies and results."""
    try:
        return await js.object_store(layout.BODIES)
    except NotFoundError:
        return await js.create_object_store(layout.BODIES)


async def put_object(js: JetStreamContext, data: bytes) -> str:
    """Store ``data`` once; returns its digest, which is its name."""
    name = layout.digest(data)
    store = await ensure_bodies(js)
    try:
        await store.get_info(name)
    except ObjectNotFoundError:
        size = max(1, min(CHUNK_BYTES, layout.large_bytes(js._nc.max_payload)))
        await store.put(name, data, ObjectMeta(options=ObjectMetaOptions(max_chunk_size=size)))
    return name


async def get_object(js: JetStreamContext, name: str) -> bytes:
    """What `put_object` stored.

    Raises:
        NotFoundError: there is no such object.
        DigestMismatchError: it is not what was stored.
        BadObjectMetaError: the same.
        TimeoutError: a part of it is not there.
    """
    store = await js.object_store(layout.BODIES)
    async with asyncio.timeout(OBJECT_S):  # it would wait for ever for what was removed
        data = (await store.get(name)).data or b""
    if layout.digest(bytes(data)) != name:
        raise DigestMismatchError
    return bytes(data)


class BatchStore:
    """Batches on one NATS.

    Args:
        connection: To NATS with JetStream.
    """

    def __init__(self, connection: Client) -> None:
        self._connection = connection
        self._js = connection.jetstream(timeout=READ_TIMEOUT_S)

    async def submit(
        self,
        lines: Iterable[str],
        model: str,
        version: str = "1",
        *,
        priority: str = "normal",
        deadline_s: float | None = None,
        batch: str | None = None,
        shown: Callable[[int], None] = lambda _: None,
    ) -> BatchRecord:
        """Queue the requests of a file.

        An interrupted submission that is run again under its id adds what is missing.

        Args:
            lines: Of the file.
            model: Served model name.
            version: Of the model.
            priority: One of `PRIORITIES`.
            deadline_s: Seconds since 1970.
            batch: Id; by default a new one.
            shown: Told how many requests have been queued.

        Raises:
            MalformedLine: a line is no request; nothing has been queued.
        """
        requests = list(read_lines(lines))
        if not requests:
            raise MalformedLine("the file has no requests")
        record = BatchRecord(batch or f"batch_{secrets.token_hex(12)}", model, version, priority, 0, deadline_s)
        if not protocol.TOKEN.fullmatch(record.id):
            raise ConfigurationError(f"the id of a batch must match {protocol.TOKEN.pattern}, got {record.id!r}")
        await ensure_queue(self._js, record.subjects, priority)
        await ensure_bucket(self._js, layout.results_bucket(record.id))
        records = await ensure_bucket(self._js, layout.BATCHES)
        await records.put(record.id, record.as_bytes())
        for first in range(0, len(requests), PUBLISHED_AT_ONCE):
            some = requests[first : first + PUBLISHED_AT_ONCE]
            await asyncio.gather(*(self._queue(record, first + at, *each) for at, each in enumerate(some)))
            shown(first + len(some))
        record = replace(record, num_requests=len(requests))
        await records.put(record.id, record.as_bytes())
        return record

    async def _queue(self, record: BatchRecord, index: int, custom_id: str, url: str, body: Any) -> None:
        data = protocol.encoded(body)
        request = QueuedRequest(record.id, index, custom_id, url, body, "", record.deadline_s)
        if len(data) >= layout.LARGE_BYTES:
            request = replace(request, body=None, body_digest=await put_object(self._js, data))
        message_id = f"{record.id}/{request.key}/{layout.request_digest(custom_id, url, body)}"
        subject = layout.queue_subject(record.subjects, record.priority, record.id)
        await self._js.publish(subject, request.as_bytes(), headers={"Nats-Msg-Id": message_id})

    async def record(self, batch: str) -> BatchRecord:
        """What was submitted. Raises `ConfigurationError` if there is no such batch."""
        try:
            entry = await (await self._js.key_value(layout.BATCHES)).get(batch)
        except (BucketNotFoundError, KeyNotFoundError):
            raise ConfigurationError(f"there is no batch {batch!r}") from None
        return BatchRecord.from_bytes(entry.value or b"")

    async def status(self, batch: str, *, count_failed: bool = False) -> BatchStatus:
        """How far a batch is. Counting those that failed reads every result."""
        record = await self.record(batch)
        bucket = await self._js.key_value(layout.results_bucket(batch))
        answered = (await bucket.status()).values
        failed = None
        if count_failed:
            failed = sum([is_failure(line) async for line in self.results(batch)])
        return BatchStatus(record, answered, failed)

    async def results(self, batch: str) -> AsyncIterator[Line]:
        """The results so far, in the order of the file."""
        await self.record(batch)
        bucket = await self._js.key_value(layout.results_bucket(batch))
        number = (await bucket.status()).values
        found: dict[str, tuple[int, Line]] = {}
        watcher = await bucket.watchall()
        try:
            while len(found) < number:  # its own mark of the end may come before entries that are on their way
                entry = await watcher.updates(READ_TIMEOUT_S)  # type: ignore[no-untyped-call]
                if entry is not None:
                    found[entry.key] = await self._result(json.loads(entry.value))
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]
        for _, line in sorted(found.values(), key=lambda each: each[0]):
            yield line

    async def _result(self, value: Line) -> tuple[int, Line]:
        if "object" in value:
            value = json.loads(await get_object(self._js, value["object"]))
        return value["index"], value["line"]

    async def cancel(self, batch: str) -> BatchRecord:
        """No request of the batch is answered from now on; results that are there stay."""
        record = replace(await self.record(batch), cancelled=True)
        await (await self._js.key_value(layout.BATCHES)).put(batch, record.as_bytes())
        stream = layout.stream_name(record.subjects, record.priority)
        subject = layout.queue_subject(record.subjects, record.priority, batch)
        await self._js.purge_stream(stream, subject=subject)
        await self._connection.publish(layout.CANCEL_SUBJECT, batch.encode())
        await self._connection.flush()
        return record


def is_failure(line: Line) -> bool:
    """Whether a line of the results is an error."""
    response = line["response"]
    return line["error"] is not None or response is None or response["status_code"] >= 400
