"""The worker's side of batches: fetch what the engine has room for, answer, acknowledge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from worker.arguments import Arguments
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.answerer import BatchAnswerer, unfailing
from worker.runtimes.nats.batch.layout import PRIORITIES
from worker.runtimes.nats.batch.loops import Loops
from worker.runtimes.nats.batch.queues import WorkQueue
from worker.runtimes.nats.batch.running import Cancelled, Place, Returned, RunningRequest, Slots, place_of
from worker.runtimes.nats.batch.storage import BatchStorage, ensure_dead_letters
from worker.runtimes.nats.protocol import Malformed, Subjects

logger = logging.getLogger(__name__)

IDLE_S = 0.1
"""Pause before queues that had no requests are asked again."""

RENEW_S = 2.0
"""Time between two looks at what an operator may have deleted or changed."""

STOP_S = 5.0
"""Seconds that requests have to be given back in a drain."""

ROOM_S = 0.02
"""Time between two looks at what online requests wait for."""


class BatchConsumer:
    """Answers the requests of batches with what online requests leave of the engine.

    Args:
        messages: Server of the requests.
        arguments: The worker's options.
    """

    def __init__(self, messages: DirectServer, arguments: Arguments) -> None:
        self._messages = messages
        self._server = messages.server
        self._subjects = Subjects(arguments.served_model_name, arguments.model_version)
        self._ack_wait_s = arguments.batch_ack_wait_s
        self._max_deliver = arguments.batch_max_deliver
        self._running: dict[Place, RunningRequest] = {}
        self._slots = Slots(messages.server, self._running)
        self._asides: dict[Place, asyncio.Task[None]] = {}
        self._loops = Loops()
        self._fetching: asyncio.Task[bool] | None = None
        self._client: Client | None = None
        self._storage: BatchStorage | None = None
        self._answerer: BatchAnswerer  # once it has started
        self._queues: list[WorkQueue] = []

    @property
    def problem(self) -> str | None:
        """Reason for which no requests of batches are answered now, None if they are."""
        return self._loops.problem or (None if self._storage is None else self._storage.server.problem)

    async def start(self, client: Client) -> None:
        """Make what is not there yet, and take requests from now on.

        Raises:
            NatsError: the server has no JetStream.
            ConfigurationError: a stream of the server's is not what it must be.
        """
        self._client = client
        self._storage = BatchStorage(client)
        self._answerer = BatchAnswerer(self._messages, self._storage, self._max_deliver)
        if self._server.info.numerics != "exact":
            logger.warning("batches: --numerics is not exact, so that a re-run may give other results")
        for priority in PRIORITIES:
            queue = WorkQueue(client, self._subjects, priority, self._ack_wait_s)
            await queue.open()
            self._queues.append(queue)
        await ensure_dead_letters(self._storage.js)
        await client.subscribe(layout.CANCEL_SUBJECT, cb=self._cancel)
        self._loops.begin("fetch", self._fetch_some)
        self._loops.begin("hold what is being answered", self._hold_all)
        self._loops.begin("make room", self._make_room)
        self._loops.begin("look at the queues", self._renew_queues)

    async def stop(self) -> None:
        """Take no more, and give back what is not answered yet, for `STOP_S` at most."""
        self._loops.stop()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + STOP_S
        self._give_back()
        if self._fetching is not None:  # what is on its way here is given back, too
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end_s):
                    await asyncio.gather(self._fetching, return_exceptions=True)
            self._give_back()
        running = list(self._running.values())
        tasks = [*(each.task for each in running if each.task is not None), *self._asides.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, end_s - loop.time()))
            for task in late:  # the server is away: it gives them to others by itself
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _give_back(self) -> None:
        for running in self._running.values():
            running.end(Returned())

    async def _fetch_some(self) -> None:
        assert self._client is not None
        if self._client.is_connected:
            self._fetching = asyncio.create_task(self._fetch())
            if await asyncio.shield(self._fetching):
                return
        await asyncio.sleep(IDLE_S)

    async def _fetch(self) -> bool:
        """Fetch once, of the highest priority that has any; whether anything came."""
        for queue in self._queues:
            if self._slots.num_free == 0:
                return False
            fetched = await queue.fetch(self._slots.num_free)
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
            place = place_of(message)
        except (NatsError, ValueError):
            logger.warning("batches: dropped a message that came from no queue")
            return
        try:
            running = RunningRequest.read(message)
        except Malformed as error:
            self._aside(place, self._answerer.set_aside(message, f"malformed: {error}"))
            return
        except Exception as error:  # the boundary of a message, which any client may have published
            logger.exception("batches: a message cannot be begun")
            self._aside(place, self._answerer.set_aside(message, f"cannot be begun: {type(error).__name__}"))
            return
        if place in self._running:  # the server was away for longer than it waits for a sign of life
            self._running[place].message = message
        elif any(each.id == running.id for each in self._running.values()):  # submitted again, altered
            self._aside(place, self._answerer.hand_back(running))
        else:
            self._running[place] = running
            running.task = asyncio.create_task(self._answerer.run(running))
            running.task.add_done_callback(lambda _: self._running.pop(place, None))

    def _aside(self, place: Place, work: Coroutine[Any, Any, None]) -> None:
        """Do something with a message that takes no slot."""
        if place in self._asides:
            work.close()
            return
        task = self._asides[place] = asyncio.create_task(unfailing(work))
        task.add_done_callback(lambda _: self._asides.pop(place, None))

    async def _hold_all(self) -> None:
        """Tell the server of every request that it is still being answered."""
        await asyncio.sleep(min(queue.ack_wait_s for queue in self._queues) / 3)
        for running in list(self._running.values()):
            with contextlib.suppress(NatsError, OSError):
                await running.message.in_progress()

    async def _make_room(self) -> None:
        """Give requests of batches back while online requests wait for a slot: the latest first."""
        await asyncio.sleep(ROOM_S)
        latest = [each for each in reversed(list(self._running.values())) if each.ends_as is None]
        for running in latest[: max(0, self._slots.num_missing)]:
            running.end(Returned())

    async def _cancel(self, message: Msg) -> None:
        batch = message.data.decode(errors="replace")
        for running in self._running.values():
            if running.request.batch == batch:
                running.end(Cancelled())
