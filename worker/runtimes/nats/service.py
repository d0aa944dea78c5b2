"""The worker as a NATS service: registration, dispatch, cancellation, heartbeats, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.micro.request import Request
from nats.micro.service import Service

from worker import __version__
from worker.arguments import Arguments
from worker.errors import Draining, InvalidRequest, RequestFailed, ServingError
from worker.metrics import OUTCOMES
from worker.runtimes.nats import protocol
from worker.runtimes.nats.messages import MessageServer
from worker.runtimes.nats.protocol import HEARTBEAT_S, REQUEST_ID, WINDOW, Subjects
from worker.runtimes.nats.replies import ReplyGuard
from worker.runtimes.nats.request import NatsRequest
from worker.runtimes.nats.stream import AnswerStream
from worker.server.description import describe

logger = logging.getLogger(__name__)

QUEUE_GROUP = "workers"
SETTLE_S = 5.0
"""Seconds for clients to acknowledge the ends of their answers before the worker leaves."""


class NatsService:
    """Registers a worker and serves what its queue group gets. One event loop only.

    Args:
        messages: Serves.
        arguments: The worker's options.
    """

    def __init__(self, messages: MessageServer, arguments: Arguments) -> None:
        self.subjects = Subjects(arguments.served_model_name, arguments.model_version)
        self._messages = messages
        self._server = messages.server
        self._arguments = arguments
        self._client: Client | None = None
        self._guard: ReplyGuard | None = None
        self._service: Service | None = None
        self._streams: dict[str, AnswerStream] = {}
        self._running: dict[str, NatsRequest | None] = {}
        self._cancelled: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat: asyncio.Task[None] | None = None

    @property
    def instance(self) -> str:
        """Id of this worker's service, among those of its model."""
        assert self._service is not None, "start comes first"
        return str(self._service.id)

    async def start(self, client: Client) -> None:
        """Register: from now on requests come."""
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
        await guard.subscribe(self.subjects.acknowledge(self.instance, "*"), cb=self._acknowledged)
        await guard.subscribe(self.subjects.cancel("*"), cb=self._cancel)
        self._beat = asyncio.create_task(self._send_heartbeats())
        await self._service.add_endpoint(name="info", subject=self.subjects.info, handler=self._describe)
        await self._service.add_endpoint(
            name="generate", subject=self.subjects.generate, queue_group=QUEUE_GROUP, handler=self._accept
        )
        await client.flush()
        logger.info("serving %s at %s as %s", self.subjects.model, self.subjects.generate, self.instance)

    def stats(self) -> dict[str, Any]:
        """Our part of the service's statistics."""
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
        """Takes one request from the queue group; must not wait for it to be served."""
        task = asyncio.create_task(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message: Request) -> None:
        subject = str(message._msg.reply)
        if not subject:
            logger.warning("a request without a reply subject was dropped")
            return
        headers = message.headers or {}
        request_id = headers.get(REQUEST_ID) or self._new_id()
        try:
            window = self._checked_window(request_id, headers)
        except InvalidRequest as error:  # nothing to acknowledge: the id may be another request's
            await self._fail(self._stream(subject, "", "", 0), error)
            return
        stream = self._stream(subject, request_id, self.subjects.acknowledge(self.instance, request_id), window)
        self._streams[request_id], self._running[request_id] = stream, None
        try:
            await self._answer(request_id, message.data, stream)
        except ServingError as error:
            await self._fail(stream, error)
        except NatsError as error:  # too large a message, or too much waits for a server that is away
            reason = RequestFailed(f"the answer cannot be sent: {error}")
            await self._fail(stream, reason)
        except Exception:  # the request boundary: one request's unknown error stays its own
            logger.exception("request %s failed", request_id)
            await self._fail(stream, ServingError("internal error"))
        finally:
            del self._running[request_id]
            self._cancelled.discard(request_id)
            if stream.is_settled:
                del self._streams[request_id]

    async def _answer(self, request_id: str, data: bytes, stream: AnswerStream) -> None:
        if self._server.in_flight.closed:
            raise Draining("this worker is shutting down")
        try:
            message = protocol.decoded(data)
        except protocol.Malformed as error:
            raise InvalidRequest(error.field, str(error)) from None
        request = self._running[request_id] = await self._messages.parsed(message)
        if stream.is_gone or request_id in self._cancelled:
            await stream.send({"token_ids": [], "index": 0, "finish_reason": "cancelled"})
            await stream.end()
            return
        async with contextlib.aclosing(self._messages.chunks(request_id, request)) as chunks:
            async for chunk in chunks:
                await stream.send(chunk)
                if stream.is_gone:
                    return
        await stream.end()

    async def _fail(self, stream: AnswerStream, error: ServingError) -> None:
        with contextlib.suppress(NatsError):  # the client notices by the silence
            await stream.fail(error)

    def _stream(self, subject: str, request_id: str, acknowledge: str, window: int) -> AnswerStream:
        assert self._client is not None

        def gone() -> None:
            self._end(request_id)

        return AnswerStream(self._client, subject, acknowledge, window, gone, time.monotonic)

    def _checked_window(self, request_id: str, headers: Mapping[str, str]) -> int:
        """Messages that the client takes ahead of its acknowledgements. Raises `InvalidRequest`."""
        if not protocol.TOKEN.fullmatch(request_id):
            raise InvalidRequest(REQUEST_ID, f"must match {protocol.TOKEN.pattern}, got {request_id[:60]!r}")
        if request_id in self._streams:
            raise InvalidRequest(REQUEST_ID, f"{request_id[:60]!r} is being served already")
        window = headers.get(WINDOW, "0")
        if not window.isdecimal() or len(window) > 7 or int(window) > protocol.MAX_WINDOW:
            raise InvalidRequest(WINDOW, f"must be an integer from 0 to {protocol.MAX_WINDOW}, got {window[:60]!r}")
        return int(window)

    def _new_id(self) -> str:
        assert self._client is not None
        return self._client._nuid.next().decode()

    async def _acknowledged(self, message: Msg) -> None:
        request_id = message.subject.rpartition(".")[2]
        stream = self._streams.get(request_id)
        if stream is not None:
            await stream.acknowledged(message.headers or {})
            if stream.is_settled and request_id not in self._running:
                del self._streams[request_id]

    async def _cancel(self, message: Msg) -> None:
        self._end(message.subject.rpartition(".")[2])

    def _end(self, request_id: str) -> None:
        request = self._running.get(request_id)
        if request is not None:
            self._messages.end(request_id, request)
        elif request_id in self._running:
            self._cancelled.add(request_id)  # its prompt is being read

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            for request_id, stream in list(self._streams.items()):
                with contextlib.suppress(NatsError):
                    await stream.heartbeat()
                if stream.is_settled and request_id not in self._running:
                    self._streams.pop(request_id, None)

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
        """Until every answer is sent and acknowledged, for ``timeout_s`` at most."""
        deadline_s = time.monotonic() + timeout_s
        while self._tasks or not all(stream.is_settled for stream in self._streams.values()):
            if time.monotonic() > deadline_s:
                logger.warning("%d answers were not acknowledged", len(self._streams))
                break
            await asyncio.sleep(0.01)
        if self._beat is not None:
            self._beat.cancel()
