"""The worker as a NATS service: registration, dispatch, cancellation, heartbeats, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import nats.micro
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.micro.request import Request
from nats.micro.service import Service

from worker import __version__
from worker.arguments import Arguments
from worker.errors import Draining, InvalidRequest, RequestFailed, ServingError, shown
from worker.metrics import OUTCOMES
from worker.runtimes.direct.answer import cancelled
from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.nats import protocol
from worker.runtimes.nats.open_answers import OpenAnswers
from worker.runtimes.nats.protocol import REQUEST_ID, WINDOW, Subjects
from worker.runtimes.nats.replies import ReplyGuard
from worker.runtimes.nats.stream import AnswerStream
from worker.server.description import describe

logger = logging.getLogger(__name__)

QUEUE_GROUP = "workers"
SETTLE_S = 5.0
"""Seconds for clients to acknowledge the ends of their answers before the worker leaves."""


class NatsService:
    """Registers a worker and serves what its queue group gets. One event loop only.

    Args:
        messages: Server of the messages' requests.
        arguments: The worker's options.
    """

    def __init__(self, messages: DirectServer, arguments: Arguments) -> None:
        self.subjects = Subjects(arguments.served_model_name, arguments.model_version)
        self._messages = messages
        self._server = messages.server
        self._arguments = arguments
        self._client: Client | None = None
        self._guard: ReplyGuard | None = None
        self._service: Service | None = None
        self._answers = OpenAnswers(messages.end)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat: asyncio.Task[None] | None = None

    @property
    def instance(self) -> str:
        """Id of this worker's service, among those of its model."""
        assert self._service is not None, "start comes first"
        return str(self._service.id)

    async def start(self, client: Client) -> None:
        """Register; requests come from now on."""
        self._client = client
        guard = self._guard = ReplyGuard(client, self._arguments.nats_reply_prefixes)
        info = self._server.info
        self._service = await nats.micro.add_service(
            cast(Client, guard),
            name=self.subjects.service,
            version=__version__,
            description=f"dynamo-logits-worker: {self.subjects.model}, version {self.subjects.version}",
            metadata={
                "model": self.subjects.model,
                "model_version": self.subjects.version,
                "engine": info.name,
                "context_length": str(info.context_length),
            },
            stats_handler=lambda _: self.stats(),
        )
        await guard.subscribe(self.subjects.acknowledge(self.instance, "*"), cb=self._answers.acknowledge)
        await guard.subscribe(self.subjects.cancel("*"), cb=self._answers.cancel)
        self._beat = asyncio.create_task(self._answers.send_heartbeats())
        await self._service.add_endpoint(name="info", subject=self.subjects.info, handler=self._describe)
        await self._service.add_endpoint(
            name="generate", subject=self.subjects.generate, queue_group=QUEUE_GROUP, handler=self._accept
        )
        await client.flush()
        logger.info("serving %s at %s as %s", self.subjects.model, self.subjects.generate, self.instance)

    def stats(self) -> dict[str, Any]:
        """The worker's part of the service's statistics."""
        registry = self._server.metrics.registry
        ended = {name: registry.get_sample_value("dlw_requests_total", {"outcome": name}) for name in OUTCOMES}
        return {
            "in_flight": len(self._server.in_flight),
            "draining": self._server.in_flight.closed,
            "refused_replies": 0 if self._guard is None else self._guard.num_refused,
            "requests": {name: int(number) for name, number in ended.items() if number},
        }

    async def _describe(self, request: Request) -> None:
        await request.respond(protocol.encoded(describe(self._server)))

    async def _accept(self, request: Request) -> None:
        """Take one request from the queue group, without waiting for its answer."""
        task = asyncio.create_task(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message: Request) -> None:
        subject = str(message._msg.reply)
        assert self._client is not None
        assert self._guard is not None
        if not subject:
            self._guard.refuse(message._msg)
            return
        headers = message.headers or {}
        request_id = headers.get(REQUEST_ID) or self._client._nuid.next().decode()
        try:
            with self._server.reports.reading(request_id):
                if request_id in self._answers.streams:
                    raise InvalidRequest(REQUEST_ID, f"{request_id[:60]!r} is being served already")
                window = _checked_window(request_id, headers)
        except InvalidRequest as error:  # nothing to acknowledge: the id may be another request's
            await _fail(self._stream(subject, "", "", 0), error)
            return
        stream = self._stream(subject, request_id, self.subjects.acknowledge(self.instance, request_id), window)
        with self._answers.running(request_id, stream):
            try:
                await self._answer(request_id, message.data, stream)
            except ServingError as error:
                await _fail(stream, error)
            except NatsError as error:  # too large a message, or too much waits for a server that is away
                await _fail(stream, RequestFailed(f"the answer cannot be sent: {error}"))
            except Exception:  # the request boundary: one request's unknown error stays its own
                logger.exception("request %s failed", request_id)
                await _fail(stream, ServingError("internal error"))

    async def _answer(self, request_id: str, data: bytes, stream: AnswerStream) -> None:
        with self._server.reports.reading(request_id):
            request = await self._read(data)
        if not self._answers.begin(request_id, request):
            for chunk in cancelled(request):
                await stream.send(chunk)
            await stream.end()
            return
        async with contextlib.aclosing(self._messages.chunks(request_id, request)) as chunks:
            async for chunk in chunks:
                await stream.send(chunk)
                if stream.is_gone:
                    return
        await stream.end()

    async def _read(self, data: bytes) -> DirectRequest:
        """The request in a message. Raises `Draining`, `InvalidRequest`."""
        if self._server.in_flight.closed:
            raise Draining("this worker is shutting down")
        try:
            message = protocol.decoded(data)
        except protocol.Malformed as error:
            raise InvalidRequest(error.field, str(error)) from None
        self._check_model(message.get("model"))
        return await self._messages.parsed(message)

    def _check_model(self, model: Any) -> None:
        """Raises `InvalidRequest` for another model: a subject may stand for several names."""
        served = self._arguments.served_model_name
        if model not in (None, served, self._arguments.model_path):
            problem = f"must be {served!r}, got {shown(model)}; an adapter is chosen by routing.lora_name"
            raise InvalidRequest("model", problem)

    def _stream(self, subject: str, request_id: str, acknowledge: str, window: int) -> AnswerStream:
        assert self._client is not None
        end = partial(self._answers.end, request_id)
        return AnswerStream(self._client, subject, acknowledge, window, end, time.monotonic)

    async def stop_accepting(self) -> None:
        """Take no more requests from the queue group; those that have come are served."""
        if self._service is None:
            return
        for endpoint in self._service._endpoints:
            subscription = endpoint._subscription
            if endpoint._name == "generate" and subscription is not None:
                with contextlib.suppress(NatsError):
                    await subscription.drain()

    async def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until every answer is sent and acknowledged, for ``timeout_s`` at most."""
        deadline_s = time.monotonic() + timeout_s
        while self._tasks or not self._answers.are_settled:
            if time.monotonic() > deadline_s:
                logger.warning("%d answers were not acknowledged", len(self._answers.streams))
                break
            await asyncio.sleep(0.01)
        if self._beat is not None:
            self._beat.cancel()


def _checked_window(request_id: str, headers: Mapping[str, str]) -> int:
    """Messages that the client takes ahead of its acknowledgements. Raises `InvalidRequest`."""
    if not protocol.TOKEN.fullmatch(request_id):
        raise InvalidRequest(REQUEST_ID, f"must match {protocol.TOKEN.pattern}, got {request_id[:60]!r}")
    window = headers.get(WINDOW, "0")
    if not window.isdecimal() or len(window) > 7 or int(window) > protocol.MAX_WINDOW:
        raise InvalidRequest(WINDOW, f"must be an integer from 0 to {protocol.MAX_WINDOW}, got {window[:60]!r}")
    return int(window)


async def _fail(stream: AnswerStream, error: ServingError) -> None:
    try:
        await stream.fail(error)
    except (NatsError, OSError):
        stream.give_up()  # no heartbeats any more: the client notices by the silence
