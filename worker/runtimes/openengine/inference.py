"""``openengine.v1.Inference``: generates answers, and ends them on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace

import grpc
from grpc.aio import ServicerContext

from worker.errors import Draining, EngineBroken, InvalidRequest, ServingError
from worker.requests.prompt_scores import token_text
from worker.runtimes.direct.answer import cancelled
from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.answer import Answer
from worker.runtimes.openengine.errors import DuplicateRequest, engine_error
from worker.runtimes.openengine.request import Asked, CallHints, read, read_hints, renamed
from worker.server import RequestServer

logger = logging.getLogger(__name__)

AT_ONCE = 16 * 1024
"""Bytes of the largest request that the event loop reads itself: about 20 ms at worst."""

STALL_S = 60.0
"""Seconds for which a client may read nothing of its answer; then its request is ended."""


@dataclass(slots=True)
class _Running:
    """A request in flight.

    Attributes:
        request: The request, None while its prompt is read.
        is_aborted: Whether it was aborted meanwhile.
    """

    request: DirectRequest | None = None
    is_aborted: bool = False


class _Stalled(Exception):
    """The client reads nothing."""


class Inference:
    """Serves ``Generate``. One event loop only.

    Args:
        server: Server of requests, which may not be loaded yet.

    Attributes:
        direct: Serves requests whose prompts are text, None before the model is loaded.
        names: Names of the model, those that requests may have for it.
    """

    def __init__(self, server: RequestServer) -> None:
        self.direct: DirectServer | None = None
        self.names = (server.arguments.served_model_name, server.arguments.model_path)
        self._server = server
        self._running: dict[str, _Running] = {}

    async def generate(self, request: wire.GenerateRequest, context: ServicerContext) -> None:
        """Answer a request with a stream of events.

        A request that fails has an `EngineError` as its last event: Dynamo's sidecar gives a worker
        no requests for some seconds after the status of a failure, so that one request's failure
        would be that of others. A worker that leaves ends its streams with that status: Dynamo's
        frontend migrates their requests, which it does not after an `EngineError`.

        Raises:
            InvalidRequest: it is refused, before the first event.
            Draining, EngineBroken: this worker leaves.
        """
        request_id = request.request_id or uuid.uuid4().hex
        try:
            async with contextlib.aclosing(self._with_failure(request_id, request, context)) as events:
                async for event in events:
                    await _write(context, event)
        except _Stalled as stall:
            logger.warning("request %s ended: %s", request_id, stall)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(stall))

    async def _with_failure(
        self, request_id: str, request: wire.GenerateRequest, context: ServicerContext
    ) -> AsyncGenerator[wire.GenerateResponse, None]:
        """The events of a request, with that of its failure."""
        has_begun = False
        try:
            async with contextlib.aclosing(self._events(request_id, request, context)) as events:
                async for event in events:
                    yield event
                    has_begun = True
        except ServingError as error:
            if isinstance(error, (Draining, EngineBroken)) or (isinstance(error, InvalidRequest) and not has_begun):
                raise
            yield wire.GenerateResponse(request_id=request_id, error=engine_error(error))

    async def _events(
        self, request_id: str, request: wire.GenerateRequest, context: ServicerContext
    ) -> AsyncGenerator[wire.GenerateResponse, None]:
        direct, reports = self.direct, self._server.reports
        with contextlib.ExitStack() as in_flight:
            with reports.reading(request_id):
                if direct is None:
                    raise Draining("this worker is not serving yet")
                running = in_flight.enter_context(self._run(request_id))
                honours_priority = self._server.info.honours_priority
                hints = read_hints(context.invocation_metadata(), honours_priority=honours_priority)
                if request.ByteSize() <= AT_ONCE:
                    asked = read(request, self.names, hints)
                else:
                    asked = await asyncio.to_thread(read, request, self.names, hints)
            try:
                with reports.reading(request_id, hints.trace):
                    running.request = _uncut(await direct.parsed(asked.message))
                async with contextlib.aclosing(self._answer(request_id, asked, running, hints)) as events:
                    async for event in events:
                        yield event
            except InvalidRequest as error:
                raise renamed(error, request) from error.__cause__

    async def _answer(
        self, request_id: str, asked: Asked, running: _Running, hints: CallHints
    ) -> AsyncGenerator[wire.GenerateResponse, None]:
        direct, request, server = self.direct, running.request, self._server
        assert direct is not None
        assert request is not None
        answer = Answer(request_id, asked, request, token_text(server.chains.vocabulary), server.info.eos_token_ids)
        if running.is_aborted:
            for chunk in cancelled(request):
                for event in answer.events(chunk):
                    yield event
            return
        async with contextlib.aclosing(direct.chunks(request_id, request, hints.trace, hints.client)) as chunks:
            async for chunk in chunks:
                for event in answer.events(chunk):
                    yield event

    @contextlib.contextmanager
    def _run(self, request_id: str) -> Iterator[_Running]:
        if request_id in self._running:
            raise DuplicateRequest("request_id", f"{request_id[:60]!r} is being served already")
        running = self._running[request_id] = _Running()
        try:
            yield running
        finally:
            del self._running[request_id]

    def abort(self, request_id: str) -> bool:
        """End a request: its unfinished answers end as cancelled. False if it is not in flight."""
        running = self._running.get(request_id)
        if running is None:
            return False
        running.is_aborted = True
        if running.request is not None and self.direct is not None:
            self.direct.end(request_id, running.request)
        return True

    def abort_all(self) -> int:
        """End every request in flight; returns how many there were."""
        return sum([self.abort(request_id) for request_id in tuple(self._running)])


async def _write(context: ServicerContext, event: wire.GenerateResponse) -> None:
    """Send an event as soon as the client's flow control lets it. Raises `_Stalled`."""
    try:
        async with asyncio.timeout(STALL_S):
            await context.write(event)
    except TimeoutError:
        raise _Stalled(f"its client has read nothing for {STALL_S:g} s") from None


def _uncut(request: DirectRequest) -> DirectRequest:
    """The request, whose answer without text is not cut before a stop string: its client makes the
    text. It gets the token that completes the stop string, and cuts the text itself, as Dynamo's
    frontend does.
    """
    return request if request.wants_text else replace(request, stops=())
