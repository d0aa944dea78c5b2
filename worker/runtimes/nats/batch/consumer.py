"""The worker's side of batches: fetch what the engine has room for, answer, acknowledge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.errors import BadRequestError, KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from worker.arguments import Arguments
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, RequestFailed, ServingError
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch import layout, openai
from worker.runtimes.nats.batch.layout import PRIORITIES, QueuedRequest
from worker.runtimes.nats.batch.store import ensure_bucket, ensure_queue, get_object, put_object
from worker.runtimes.nats.messages import MessageServer, choice_id
from worker.runtimes.nats.protocol import Subjects
from worker.runtimes.nats.request import NatsRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

FETCH_S = 0.2
"""Seconds that a fetch waits for requests of one priority."""

RETURN_S = 1.0
"""Delay after which a request that was handed back is delivered again."""

FAILURE_DELAY_S = 5.0
"""The same after an error that may pass."""

RETRY_S = 0.25
ONLINE_PART = 8
"""One slot of this many stays free for requests that clients wait for."""


class _Returned(Exception):
    """The request goes back to the queue, through no fault of its own."""


class _Running:
    """One request that is being answered."""

    def __init__(self, message: Msg, request: QueuedRequest) -> None:
        self.message = message
        self.request = request
        self.id = f"{request.batch}-{layout.digest(request.custom_id.encode())}"
        self.parsed: NatsRequest | None = None
        self.ends_as: Exception | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.parsed is None else self.parsed.num_choices

    @property
    def served_ids(self) -> list[str]:
        """Ids of its choices where they are served."""
        parsed = self.parsed
        return [] if parsed is None else [choice_id(self.id, parsed, choice) for choice in range(parsed.num_choices)]

    def end(self, reason: Exception) -> None:
        """Stop answering."""
        if self.task is not None and self.ends_as is None:
            self.ends_as = reason
            self.task.cancel()


class _Cancelled(Exception):
    """Its batch was cancelled."""


class _Expired(Exception):
    """Its deadline has passed."""


class BatchConsumer:
    """Answers the requests of batches with what online requests leave of the engine.

    Args:
        messages: Serves.
        arguments: The worker's options.
    """

    def __init__(self, messages: MessageServer, arguments: Arguments) -> None:
        self._messages = messages
        self._server = messages.server
        self._subjects = Subjects(arguments.served_model_name, arguments.model_version)
        self._ack_wait_s = arguments.batch_ack_wait_s
        self._max_deliver = arguments.batch_max_deliver
        self._running: dict[int, _Running] = {}
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._client: Client | None = None
        self._buckets: dict[str, KeyValue] = {}
        self._queues: dict[str, JetStreamContext.PullSubscription] = {}

    @property
    def js(self) -> JetStreamContext:
        assert self._client is not None, "start comes first"
        return self._client.jetstream(timeout=5)

    async def start(self, client: Client) -> None:
        """Make what is not there yet, and take requests from now on.

        Raises:
            NatsError: the server has no JetStream.
        """
        self._client = client
        if self._server.info.numerics != "exact":
            logger.warning("batches: --numerics is not exact, so that a re-run may give other results")
        for priority in PRIORITIES:
            await ensure_queue(self.js, self._subjects, priority)
            self._queues[priority] = await self.js.pull_subscribe(
                "",
                durable=layout.CONSUMER,
                stream=layout.stream_name(self._subjects, priority),
                config=ConsumerConfig(
                    ack_policy=AckPolicy.EXPLICIT, ack_wait=self._ack_wait_s, max_deliver=-1, max_ack_pending=-1
                ),
            )
        await self.js.add_stream(StreamConfig(name=layout.DEAD_LETTERS, subjects=[layout.DEAD_LETTER_SUBJECT]))
        await client.subscribe(layout.CANCEL_SUBJECT, cb=self._cancel)
        self._tasks = [asyncio.create_task(each()) for each in (self._fetch_all, self._hold_all, self._make_room)]

    async def stop(self) -> None:
        """Take no more, and give back what is not answered yet."""
        for task in self._tasks:
            task.cancel()
        running = list(self._running.values())
        for each in running:
            each.end(_Returned())
        await asyncio.gather(*(each.task for each in running if each.task is not None), return_exceptions=True)

    @property
    def num_free(self) -> int:
        """Requests that may be fetched now."""
        slots = self._server.info.max_num_seqs
        kept = max(1, slots // ONLINE_PART) if slots > 1 else 0
        return max(0, slots - kept - self._num_online - sum(each.num_choices for each in self._running.values()))

    @property
    def _num_online(self) -> int:
        """Requests in flight that clients wait for."""
        in_flight = self._server.in_flight
        ours = sum(one in in_flight for each in self._running.values() for one in each.served_ids)
        return len(in_flight) - ours

    async def _fetch_all(self) -> None:
        while True:
            try:
                if not await self._fetch():
                    await asyncio.sleep(FETCH_S / 10)
            except (TimeoutError, NatsError, OSError) as error:
                logger.debug("batches: cannot fetch: %r", error)
                await asyncio.sleep(RETRY_S)

    async def _fetch(self) -> bool:
        """Fetch once, of the highest priority that has any; whether anything came."""
        for priority in PRIORITIES:
            if self.num_free == 0:
                return False
            with contextlib.suppress(asyncio.TimeoutError):  # nats.errors.TimeoutError is one
                fetched = await self._queues[priority].fetch(self.num_free, timeout=FETCH_S)
                for message in fetched:
                    self._begin(message)
                if fetched:
                    return True
        return False

    def _begin(self, message: Msg) -> None:
        try:
            request = QueuedRequest.from_bytes(message.data)
        except (ValueError, TypeError) as error:
            self._tasks.append(asyncio.create_task(self._set_aside(message, f"malformed: {error}")))
            return
        known = next((each for each in self._running.values() if each.request == request), None)
        if known is not None:  # the server was away for longer than it waits for a sign of life
            known.message = message
            return
        running = _Running(message, request)
        number, self._numbers = self._numbers, self._numbers + 1
        self._running[number] = running
        running.task = asyncio.create_task(self._run(running))
        running.task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _run(self, running: _Running) -> None:
        try:
            await self._answer_once(running)
        except asyncio.CancelledError:
            await self._end(running, running.ends_as or _Returned())
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            logger.exception("request %s of batch %s failed", running.request.custom_id, running.request.batch)
            await self._end(running, error)

    async def _answer_once(self, running: _Running) -> None:
        request, message = running.request, running.message
        failures = message.metadata.num_delivered - 1
        if failures:
            results = await self._retried(lambda: self._results(request.batch))
            if await self._has_result(results, request.key):
                await self._acknowledge(running)  # the last time only this was lost
                return
            failures -= await self._retried(lambda: self._returns(running))
        if failures >= self._max_deliver:
            await self._give_up(running, f"{failures} workers have not answered it")
            return
        try:
            if request.deadline_s is None:
                line = await self._answer(running)
            else:
                line = await asyncio.wait_for(self._answer(running), max(0.0, request.deadline_s - time.time()))
        except TimeoutError as error:
            await self._end(running, error if request.deadline_s is None else _Expired())
            return
        except (InvalidRequest, RequestFailed) as error:
            await self._finish(running, openai.failed_line(request, error), refused=True)
            return
        except (ServingError, _Returned) as error:
            await self._end(running, error)
            return
        await self._finish(running, line)

    async def _answer(self, running: _Running) -> dict[str, Any]:
        request = running.request
        body = request.body
        if request.body_digest:
            try:
                body = json.loads(await self._retried(lambda: get_object(self.js, request.body_digest)))
            except NotFoundError:
                raise InvalidRequest("body", "is not in the object store any more") from None
        made_of = layout.request_digest(request.custom_id, request.url, body)
        parsed = running.parsed = await self._messages.parsed(openai.message_of(request.url, body, made_of))
        chunks = [chunk async for chunk in self._messages.chunks(running.id, parsed)]
        if any(chunk.get("finish_reason") == "cancelled" for chunk in chunks):
            raise _Returned
        return openai.result_line(request, 200, openai.response_body(request, body, chunks, self._messages.tokenizer))

    async def _finish(self, running: _Running, line: dict[str, Any], *, refused: bool = False) -> None:
        """The result first, then the acknowledgement: there is one result, whoever dies between."""
        await self._write_result(running.request, line)
        if refused:
            await self._retried(lambda: running.message.term())
        else:
            await self._acknowledge(running)

    async def _write_result(self, request: QueuedRequest, line: dict[str, Any]) -> None:
        value = protocol.encoded({"index": request.index, "line": line})
        if len(value) >= layout.LARGE_BYTES:
            name = await self._retried(lambda: put_object(self.js, value))
            value = protocol.encoded({"object": name})

        async def create() -> None:
            with contextlib.suppress(KeyWrongLastSequenceError):  # answered already: by another worker, or just now
                await (await self._results(request.batch)).create(request.key, value)

        await self._retried(create)

    async def _acknowledge(self, running: _Running) -> None:
        async def acknowledge() -> None:
            if not running.message.is_acked:
                await running.message.ack_sync(timeout=2)

        await self._retried(acknowledge)

    async def _end(self, running: _Running, reason: Exception) -> None:
        """A request that has no answer of its own."""
        request, message = running.request, running.message
        if isinstance(reason, _Expired):
            line = openai.unanswered_line(request, "batch_expired", "its deadline has passed")
            await self._finish(running, line, refused=True)
        elif isinstance(reason, _Cancelled):
            await self._retried(lambda: message.term())
        elif isinstance(reason, (_Returned, Draining, EngineBroken, Overloaded)):
            await self._hand_back(running)
        else:
            with contextlib.suppress(NatsError):
                await message.nak(FAILURE_DELAY_S)

    async def _hand_back(self, running: _Running) -> None:
        """Back into the queue, without counting as an attempt; if that fails it counts as one."""
        with contextlib.suppress(NatsError, asyncio.TimeoutError):
            bucket = await ensure_bucket(self.js, layout.RETURNS)
            number = await self._returns(running)
            await bucket.put(self._returns_key(running), str(number + 1).encode())
            await running.message.nak(RETURN_S)

    def _returns_key(self, running: _Running) -> str:
        return f"{running.request.batch}.{running.request.key}"

    async def _returns(self, running: _Running) -> int:
        try:
            entry = await (await ensure_bucket(self.js, layout.RETURNS)).get(self._returns_key(running))
        except KeyNotFoundError:
            return 0
        return int(entry.value or b"0")

    async def _give_up(self, running: _Running, reason: str) -> None:
        """Set a request aside that no worker could answer; it has a result that says so."""
        await self._set_aside(running.message, reason, ends=False)
        line = openai.unanswered_line(running.request, "dead_letter", reason)
        await self._finish(running, line, refused=True)

    async def _set_aside(self, message: Msg, reason: str, *, ends: bool = True) -> None:
        logger.error("batches: a request was set aside in %s: %s", layout.DEAD_LETTERS, reason)
        headers = {
            "Dlw-Reason": protocol.header_text(reason),
            "Nats-Msg-Id": f"{message.metadata.stream}/{message.metadata.sequence.stream}",
        }
        await self._retried(lambda: self.js.publish(layout.DEAD_LETTER_SUBJECT, message.data, headers=headers))
        if ends:
            await self._retried(message.term)

    async def _results(self, batch: str) -> KeyValue:
        if batch not in self._buckets:
            self._buckets[batch] = await ensure_bucket(self.js, layout.results_bucket(batch))
        return self._buckets[batch]

    async def _has_result(self, results: KeyValue, key: str) -> bool:
        async def look() -> bool:
            try:
                await results.get(key)
            except KeyNotFoundError:
                return False
            return True

        return await self._retried(look)

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """``call``, again while the server is away; `_hold_all` keeps the request meanwhile."""
        while True:
            try:
                return await call()
            except (NotFoundError, BadRequestError):
                raise
            except (TimeoutError, NatsError, OSError) as error:
                if self._client is None or self._client.is_closed:
                    raise
                logger.debug("batches: again after %r", error)
                await asyncio.sleep(RETRY_S)

    async def _hold_all(self) -> None:
        """Tell the server of every request that it is still being answered."""
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            for running in list(self._running.values()):
                with contextlib.suppress(NatsError):
                    await running.message.in_progress()

    async def _make_room(self) -> None:
        """Give requests of batches back while online requests wait for a slot: the latest first."""
        while True:
            await asyncio.sleep(FETCH_S / 10)
            excess = len(self._server.in_flight) - self._server.info.max_num_seqs
            latest = [each for each in reversed(list(self._running.values())) if each.ends_as is None]
            for running in latest[: max(0, min(excess, self._num_online))]:
                running.end(_Returned())

    async def _cancel(self, message: Msg) -> None:
        batch = message.data.decode(errors="replace")
        for running in self._running.values():
            if running.request.batch == batch:
                running.end(_Cancelled())
