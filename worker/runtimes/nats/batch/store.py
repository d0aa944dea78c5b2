"""The client side of batches: submit, look at, collect, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import (
    BadObjectMetaError,
    BucketNotFoundError,
    DigestMismatchError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NotFoundError,
)
from nats.js.kv import KeyValue

from worker.errors import ConfigurationError
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.layout import BatchRecord, QueuedRequest
from worker.runtimes.nats.batch.objects import ensure_bucket, get_object, put_object
from worker.runtimes.nats.batch.queues import ensure_queue

PUBLISHED_AT_ONCE = 64

SHOWN_PROBLEMS = 10

READ_TIMEOUT_S = 10.0
"""Seconds to wait for one answer of the server."""

Line = dict[str, Any]


class MalformedLine(ConfigurationError):
    """A line of a batch file is no request; the message has its number."""


class UnknownBatch(ConfigurationError):
    """There is no batch of this id."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"there is no batch {batch[:140]!r}")


class CancelledBatch(ConfigurationError):
    """A batch of this id was cancelled, and takes no more requests."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"{batch} was cancelled; submit under another id")


class DamagedResults(ConfigurationError):
    """Results of a batch are missing or altered.

    Args:
        batch: Id of the batch.
        problems: Problem of each damaged result, by ``custom_id`` or line.
    """

    def __init__(self, batch: str, problems: Mapping[str, str]) -> None:
        some = [f"{name} {problem}" for name, problem in list(problems.items())[:SHOWN_PROBLEMS]]
        more = [f"and {len(problems) - len(some)} more"] if len(problems) > len(some) else []
        super().__init__(f"{batch}: {'; '.join([*some, *more])}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Progress of a batch.

    Attributes:
        record: Description of the batch.
        num_answered: Requests with a result, be it an error.
        num_failed: Requests whose result is an error; None where they were not counted.
    """

    record: BatchRecord
    num_answered: int
    num_failed: int | None = None

    @property
    def state(self) -> str:
        """``submitting``, ``in_progress``, ``completed``, also if it was cancelled after that, or
        ``cancelled``.
        """
        if self.num_answered >= self.record.num_requests > 0:
            return "completed"
        if self.record.cancelled:
            return "cancelled"
        return "in_progress" if self.record.num_requests else "submitting"


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


class BatchStore:
    """Batches on one NATS.

    Args:
        connection: Connection to NATS with JetStream.
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
            lines: Lines of the file.
            model: Served model name.
            version: Version of the model.
            priority: One of `PRIORITIES`.
            deadline_s: Seconds since 1970.
            batch: Id; by default a new one.
            shown: Told how many requests have been queued.

        Raises:
            MalformedLine: a line is no request; nothing has been queued.
            ConfigurationError: the id is that of another batch, or of one that was cancelled; or it
                was cancelled meanwhile, and what had been queued is taken back.
        """
        requests = list(read_lines(lines))
        if not requests:
            raise MalformedLine("the file has no requests")
        record = BatchRecord(batch or f"batch_{secrets.token_hex(12)}", model, version, priority, 0, deadline_s)
        if not protocol.TOKEN.fullmatch(record.id):
            raise ConfigurationError(f"the id of a batch must match {protocol.TOKEN.pattern}, got {record.id!r}")
        if deadline_s is not None and not math.isfinite(deadline_s):
            raise ConfigurationError(f"the deadline must be a number of seconds, got {deadline_s}")
        if batch is not None:
            await self._refuse_another(record)
        await ensure_queue(self._js, record.subjects, priority)
        await ensure_bucket(self._js, layout.results_bucket(record.id))
        records = await ensure_bucket(self._js, layout.BATCHES)
        try:
            await records.create(record.id, record.as_bytes())
        except KeyWrongLastSequenceError:  # submitted before
            await self._change(record.id, lambda known: _unless_cancelled(known, record))
        try:
            for first in range(0, len(requests), PUBLISHED_AT_ONCE):
                _unless_cancelled(await self.record(record.id), record)
                some = requests[first : first + PUBLISHED_AT_ONCE]
                await asyncio.gather(*(self._queue(record, first + at, *each) for at, each in enumerate(some)))
                shown(first + len(some))
            whole = replace(record, num_requests=len(requests))
            return await self._change(record.id, lambda known: _unless_cancelled(known, whole))
        except CancelledBatch:
            await self.cancel(record.id)  # once more: some were queued behind it
            raise

    async def _change(self, batch: str, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Put another record in the place of a batch's, which others may be changing, too.

        Args:
            batch: Id of the batch.
            change: The new record, of the one that is there; what it raises is raised.
        """
        while True:
            records, known, revision = await self._read_record(batch)
            changed = change(known)
            try:
                await records.update(batch, changed.as_bytes(), last=revision)
            except KeyWrongLastSequenceError:
                continue
            return changed

    async def _refuse_another(self, record: BatchRecord) -> None:
        """Raises `ConfigurationError` if the id of a batch is taken by one that cannot go on."""
        try:
            known = await self.record(record.id)
        except UnknownBatch:
            return
        _unless_cancelled(known, record)
        for name in ("model", "version", "priority"):
            before, now = getattr(known, name), getattr(record, name)
            if before != now:
                raise ConfigurationError(f"{record.id} was submitted with {name} {before!r}, not {now!r}")

    async def _queue(self, record: BatchRecord, index: int, custom_id: str, url: str, body: Any) -> None:
        data = protocol.encoded(body)
        request = QueuedRequest(record.id, index, custom_id, url, body, "", record.deadline_s)
        if len(data) >= layout.large_bytes(self._connection.max_payload):
            request = replace(request, body=None, body_digest=await put_object(self._js, data))
        message_id = f"{record.id}/{request.key}/{layout.request_digest(custom_id, url, body)}"
        subject = layout.queue_subject(record.subjects, record.priority, record.id)
        await self._js.publish(subject, request.as_bytes(), headers={"Nats-Msg-Id": message_id})

    async def record(self, batch: str) -> BatchRecord:
        """The record of what was submitted.

        Raises:
            UnknownBatch: there is no such batch.
            ConfigurationError: its record was altered.
        """
        return (await self._read_record(batch))[1]

    async def _read_record(self, batch: str) -> tuple[KeyValue, BatchRecord, int]:
        """The bucket of records, the record of a batch, and its revision; raises as `record`."""
        if not protocol.TOKEN.fullmatch(batch):
            raise UnknownBatch(batch)
        try:
            records = await self._js.key_value(layout.BATCHES)
            entry = await records.get(batch)
        except (BucketNotFoundError, KeyNotFoundError):
            raise UnknownBatch(batch) from None
        try:
            record = BatchRecord.from_bytes(entry.value or b"")
        except protocol.Malformed as error:
            raise ConfigurationError(f"the record of {batch} was altered: {error}") from None
        if record.id != batch:
            raise ConfigurationError(f"the record of {batch} was altered: its id is {record.id!r}")
        return records, record, entry.revision or 0

    async def _bucket(self, batch: str) -> KeyValue:
        try:
            return await self._js.key_value(layout.results_bucket(batch))
        except BucketNotFoundError:
            raise ConfigurationError(f"the results of {batch} were deleted") from None

    async def status(self, batch: str, *, count_failed: bool = False) -> BatchStatus:
        """Progress of a batch. Counting those that failed reads every result."""
        record = await self.record(batch)
        bucket = await self._bucket(batch)
        answered = (await bucket.status()).values
        failed = None
        if count_failed:
            failed = sum([is_failure(line) async for line in self.results(batch)])
        return BatchStatus(record, answered, failed)

    async def results(self, batch: str) -> AsyncIterator[Line]:
        """The results so far, in the order of the file.

        Raises:
            DamagedResults: after those that are whole: others are missing or altered.
        """
        record = await self.record(batch)
        is_queued = await self._is_queued(record)  # before: a result is written before its request leaves the queue
        found: list[tuple[int, str, Line]] = []  # two have one place where the file was changed between submissions
        problems: dict[str, str] = {}
        for key, entry in (await self._entries(await self._bucket(batch))).items():
            try:
                index, line = await self._result(key, entry)
                found.append((index, key, line))
            except (protocol.Malformed, NatsError, TimeoutError, ValueError) as error:
                problems[_shown_key(key)] = str(error) if isinstance(error, protocol.Malformed) else f"({error!r})"
        for *_, line in sorted(found, key=lambda each: each[:2]):
            yield line
        if not problems and len(found) < record.num_requests and not is_queued and not record.cancelled:
            missing = set(range(record.num_requests)) - {index for index, *_ in found}
            problems = {f"request {index + 1}": "has no result, and is queued no more" for index in sorted(missing)}
        if problems:
            raise DamagedResults(batch, problems)

    async def _entries(self, bucket: KeyValue) -> dict[str, KeyValue.Entry]:
        """Everything in a bucket, by key; what was deleted too."""
        number = (await bucket.status()).values
        found: dict[str, KeyValue.Entry] = {}
        watcher = await bucket.watchall()
        try:
            while len(found) < number:  # its own mark of the end may come before entries that are on their way
                try:
                    entry = await watcher.updates(READ_TIMEOUT_S)  # type: ignore[no-untyped-call]
                except TimeoutError:
                    now = (await bucket.status()).values
                    if now > len(found):
                        raise ConfigurationError(f"NATS has sent {len(found)} of {now} results") from None
                    break  # some were purged meanwhile
                if entry is not None:
                    found[entry.key] = entry
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]
        return found

    async def _result(self, key: str, entry: KeyValue.Entry) -> tuple[int, Line]:
        """Place and line of a result. Raises `Malformed` or an error of NATS."""
        if entry.operation is not None:
            raise protocol.Malformed("was deleted")
        try:
            value = json.loads(entry.value or b"")
            if "object" in value:
                value = json.loads(await get_object(self._js, str(value["object"])))
            index, line = value["index"], value["line"]
            is_whole = type(index) is int and layout.result_key(line["custom_id"]) == key and "response" in line
            is_whole = is_whole and "error" in line
        except NotFoundError:
            raise protocol.Malformed("is not in the object store any more") from None
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            DigestMismatchError,
            BadObjectMetaError,
        ):
            is_whole = False
        if not is_whole:
            raise protocol.Malformed("was altered")
        return index, line

    async def _is_queued(self, record: BatchRecord) -> bool:
        """Whether requests of a batch wait to be answered, or are being."""
        subject = layout.queue_subject(record.subjects, record.priority, record.id)
        try:
            info = await self._js.stream_info(
                layout.stream_name(record.subjects, record.priority), subjects_filter=subject
            )
        except NotFoundError:
            return False
        return bool((info.state.subjects or {}).get(subject))

    async def cancel(self, batch: str) -> BatchRecord:
        """No request of the batch is answered from now on; results that are there stay.

        A submission that is under way ends, and takes back what it queues behind this.
        """
        record = await self._change(batch, lambda known: replace(known, cancelled=True))
        stream = layout.stream_name(record.subjects, record.priority)
        subject = layout.queue_subject(record.subjects, record.priority, batch)
        with contextlib.suppress(NotFoundError):  # the queue was deleted
            await self._js.purge_stream(stream, subject=subject)
        await self._connection.publish(layout.CANCEL_SUBJECT, batch.encode())
        await self._connection.flush()
        return record


def _unless_cancelled(known: BatchRecord, record: BatchRecord) -> BatchRecord:
    """``record``. Raises `CancelledBatch` if the record that is there says so."""
    if known.cancelled:
        raise CancelledBatch(known.id)
    return record


def is_failure(line: Line) -> bool:
    """Whether a line of the results is an error."""
    response = line["response"]
    return line["error"] is not None or response is None or response["status_code"] >= 400


def _shown_key(key: str) -> str:
    """The ``custom_id`` that a result is of, as an error shows it."""
    try:
        return repr(layout.custom_id_of(key))[:100]
    except ValueError:
        return f"the key {key!r}"[:100]
