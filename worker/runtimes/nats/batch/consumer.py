"""The worker's side of batches: fetch what the engine has room for, answer, acknowledge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from worker.arguments import Arguments
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, RequestFailed, ServingError
from worker.runtimes.nats.batch import layout, openai
from worker.runtimes.nats.batch.layout import PRIORITIES, QueuedRequest
from worker.runtimes.nats.batch.loops import Loops
from worker.runtimes.nats.batch.queues import WorkQueue
from worker.runtimes.nats.batch.storage import BatchStorage, ensure_dead_letters
from worker.runtimes.nats.messages import MessageServer, choice_id
from worker.runtimes.nats.protocol import Malformed, Subjects
from worker.runtimes.nats.request import NatsRequest

logger = logging.getLogger(__name__)

IDLE_S = 0.1
"""Pause before queues that had no requests are asked again."""

RENEW_S = 2.0
"""Time between two looks at what an operator may have deleted or changed."""

RETURN_S = 1.0
"""Delay after which a request that was handed back is delivered again."""

FAILURE_DELAY_S = 5.0
"""The same after an error that may pass; twice as long after each further one."""

MAX_FAILURE_DELAY_S = 300.0

STOP_S = 5.0
"""Seconds that requests have to be given back in a drain."""

ROOM_S = 0.02
ONLINE_PART = 8
"""One slot of this many stays free for requests that clients wait for."""


class _Returned(Exception):
    """The request goes back to the queue, through no fault of its own."""


Place = tuple[str, int]
"""Stream and sequence number of a message: the same each time that it is delivered."""


def _place(message: Msg) -> Place:
    return message.metadata.stream, message.metadata.sequence.stream


class _Running:
    """One request that is being answered."""

    def __init__(self, message: Msg, request: QueuedRequest) -> None:
        self.message = message
        self.request = request
        self.id = f"{request.batch}/{layout.digest(request.custom_id.encode())}"  # no client's request can have it
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
        self._running: dict[Place, _Running] = {}
        self._asides: dict[Place, asyncio.Task[None]] = {}
        self._loops = Loops()
        self._client: Client | None = None
        self._storage: BatchStorage | None = None
        self._queues: list[WorkQueue] = []

    @property
    def problem(self) -> str | None:
        """Why no requests of batches are answered now, None if they are."""
        return self._loops.problem or (None if self._storage is None else self._storage.server.problem)

    @property
    def storage(self) -> BatchStorage:
        assert self._storage is not None, "start comes first"
        return self._storage

    async def start(self, client: Client) -> None:
        """Make what is not there yet, and take requests from now on.

        Raises:
            NatsError: the server has no JetStream.
            ConfigurationError: a stream of the server's is not what it must be.
        """
        self._client = client
        self._storage = BatchStorage(client)
        if self._server.info.numerics != "exact":
            logger.warning("batches: --numerics is not exact, so that a re-run may give other results")
        for priority in PRIORITIES:
            queue = WorkQueue(client, self._subjects, priority, self._ack_wait_s)
            await queue.open()
            self._queues.append(queue)
        await ensure_dead_letters(self.storage.js)
        await client.subscribe(layout.CANCEL_SUBJECT, cb=self._cancel)
        self._loops.begin("fetch", self._fetch_some)
        self._loops.begin("hold what is being answered", self._hold_all)
        self._loops.begin("make room", self._make_room)
        self._loops.begin("look at the queues", self._renew_queues)

    async def stop(self) -> None:
        """Take no more, and give back what is not answered yet, for `STOP_S` at most."""
        self._loops.stop()
        running = list(self._running.values())
        for each in running:
            each.end(_Returned())
        tasks = [*(each.task for each in running if each.task is not None), *self._asides.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:  # the server is away: it gives them to others by itself
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

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

    async def _fetch_some(self) -> None:
        assert self._client is not None
        if not self._client.is_connected or not await self._fetch():
            await asyncio.sleep(IDLE_S)

    async def _fetch(self) -> bool:
        """Fetch once, of the highest priority that has any; whether anything came."""
        for queue in self._queues:
            if self.num_free == 0:
                return False
            fetched = await queue.fetch(self.num_free)
            for message in fetched:
                self._begin(message)
            if fetched:
                return True
        return False

    async def _renew_queues(self) -> None:
        assert self._client is not None
        if self._client.is_connected:
            for queue in self._queues:
                await queue.renew()
        await asyncio.sleep(RENEW_S)

    def _begin(self, message: Msg) -> None:
        """Begin to answer a message; what cannot be begun is set aside."""
        try:
            place = _place(message)
        except (NatsError, ValueError):
            logger.warning("batches: dropped a message that came from no queue")
            return
        try:
            running = self._read(message)
        except Malformed as error:
            self._aside(place, self._set_aside(message, f"malformed: {error}"))
            return
        except Exception as error:  # the boundary of a message that anybody may have published
            logger.exception("batches: a message cannot be begun")
            self._aside(place, self._set_aside(message, f"cannot be begun: {type(error).__name__}"))
            return
        if place in self._running:  # the server was away for longer than it waits for a sign of life
            self._running[place].message = message
        elif any(each.id == running.id for each in self._running.values()):  # submitted again, altered
            self._aside(place, self.storage.hand_back(message, running.request, RETURN_S))
        else:
            self._running[place] = running
            running.task = asyncio.create_task(self._run(running))
            running.task.add_done_callback(lambda _: self._running.pop(place, None))

    def _read(self, message: Msg) -> _Running:
        """Raises `Malformed` for what is no request, or not of the batch of its subject."""
        request = QueuedRequest.from_bytes(message.data)
        if message.subject.rpartition(".")[2] != request.batch:
            raise Malformed(f"batch is {request.batch!r}, and the subject is {message.subject[:200]!r}")
        return _Running(message, request)

    def _aside(self, place: Place, work: Coroutine[Any, Any, None]) -> None:
        """Do something with a message that takes no slot."""
        if place in self._asides:
            work.close()
            return
        task = self._asides[place] = asyncio.create_task(self._unfailing(work))
        task.add_done_callback(lambda _: self._asides.pop(place, None))

    async def _unfailing(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # the boundary of a message: it is delivered again
            logger.warning("batches: a message is left to be delivered again: %r", error)

    async def _set_aside(self, message: Msg, reason: str) -> None:
        await self.storage.set_aside(message, reason)
        await self.storage.end(message)

    async def _run(self, running: _Running) -> None:
        try:
            await self._answer_once(running)
        except asyncio.CancelledError:
            await self._unfailing(self._end(running, running.ends_as or _Returned()))
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            logger.exception("request %.60r of batch %s failed", running.request.custom_id, running.request.batch)
            await self._unfailing(self._end(running, error))

    async def _answer_once(self, running: _Running) -> None:
        request, message = running.request, running.message
        if await self.storage.has_result(request):
            await self.storage.acknowledge(running.message)  # the last time only this was lost
            return
        failures = message.metadata.num_delivered - 1
        if failures:
            failures -= await self.storage.returns(request)
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
        body = await self.storage.body(request.body_digest) if request.body_digest else request.body
        made_of = layout.request_digest(request.custom_id, request.url, body)
        parsed = running.parsed = await self._messages.parsed(openai.message_of(request.url, body, made_of))
        chunks = [chunk async for chunk in self._messages.chunks(running.id, parsed)]
        if any(chunk.get("finish_reason") == "cancelled" for chunk in chunks):
            raise _Returned
        return openai.result_line(request, 200, openai.response_body(request, body, chunks, self._messages.tokenizer))

    async def _finish(self, running: _Running, line: dict[str, Any], *, refused: bool = False) -> None:
        """The result first, then the acknowledgement: there is one result, whoever dies between."""
        await self.storage.write_result(running.request, line)
        if refused:
            await self.storage.end(running.message)
        else:
            await self.storage.acknowledge(running.message)

    async def _end(self, running: _Running, reason: Exception) -> None:
        """A request that has no answer of its own."""
        request, message = running.request, running.message
        if isinstance(reason, _Expired):
            line = openai.unanswered_line(request, "batch_expired", "its deadline has passed")
            await self._finish(running, line, refused=True)
        elif isinstance(reason, _Cancelled):
            await self.storage.end(message)
        elif isinstance(reason, (_Returned, Draining, EngineBroken, Overloaded)):
            await self.storage.hand_back(message, request, RETURN_S)
        else:
            with contextlib.suppress(NatsError, OSError):
                await message.nak(_failure_delay_s(message.metadata.num_delivered))

    async def _give_up(self, running: _Running, reason: str) -> None:
        """Set a request aside that no worker could answer; it has a result that says so."""
        await self.storage.set_aside(running.message, reason)
        line = openai.unanswered_line(running.request, "dead_letter", reason)
        await self._finish(running, line, refused=True)

    async def _hold_all(self) -> None:
        """Tell the server of every request that it is still being answered."""
        await asyncio.sleep(min(queue.ack_wait_s for queue in self._queues) / 3)
        for running in list(self._running.values()):
            with contextlib.suppress(NatsError, OSError):
                await running.message.in_progress()

    async def _make_room(self) -> None:
        """Give requests of batches back while online requests wait for a slot: the latest first."""
        await asyncio.sleep(ROOM_S)
        excess = len(self._server.in_flight) - self._server.info.max_num_seqs
        latest = [each for each in reversed(list(self._running.values())) if each.ends_as is None]
        for running in latest[: max(0, min(excess, self._num_online))]:
            running.end(_Returned())

    async def _cancel(self, message: Msg) -> None:
        batch = message.data.decode(errors="replace")
        for running in self._running.values():
            if running.request.batch == batch:
                running.end(_Cancelled())


def _failure_delay_s(num_delivered: int) -> float:
    """Delay after the failure of a message that was delivered so often."""
    return min(FAILURE_DELAY_S * 2.0 ** min(num_delivered - 1, 20), MAX_FAILURE_DELAY_S)
