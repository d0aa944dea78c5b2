"""`DirectServer`: serves messages, every choice of one as a request of `worker.server`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from worker.arguments import Arguments
from worker.errors import InvalidRequest
from worker.runtimes.direct.answer import ChoiceText, cancelled
from worker.runtimes.direct.contents import takes_texts
from worker.runtimes.direct.request import DirectRequest, parse
from worker.server import RequestServer

MAX_WAITING = 4
"""Chunks per choice that may wait for a slow reader of several choices."""

Chunk = dict[str, Any]


class DirectServer:
    """Server of messages, which a runtime of its own brings and whose chunks it sends.

    Args:
        server: The loaded server of requests.
        arguments: The worker's options.
    """

    def __init__(self, server: RequestServer, arguments: Arguments) -> None:
        self.server = server
        self.tokenizer = server.chains.vocabulary.tokenizer
        self._is_ended: dict[str, bool] = {}  # of requests whose choices are served
        template = arguments.custom_jinja_template
        self._template = None if template is None else Path(template).read_text(encoding="utf-8")

    async def parsed(self, message: Mapping[str, Any]) -> DirectRequest:
        """The request in a message. Raises `InvalidRequest`."""
        one_seed = self.server.info.draws_by_seed  # where a seed costs nothing, and is not refused
        return await asyncio.to_thread(self._parsed, message, one_seed)

    def _parsed(self, message: Mapping[str, Any], one_seed: bool) -> DirectRequest:
        takes_texts = self._takes_texts if "messages" in message else None
        return parse(message, self.tokenizer, self._template, one_seed=one_seed, takes_texts=takes_texts)

    @cached_property
    def _takes_texts(self) -> bool:
        return takes_texts(self.tokenizer, self._template)

    async def chunks(
        self,
        request_id: str,
        request: DirectRequest,
        trace: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of every choice, as they come.

        Args:
            request_id: Id that no other request in flight has.
            request: The request.
            trace: Headers of the W3C trace context that it belongs to.
            metadata: Metadata of the request; see `RequestServer.serve`.

        Raises:
            ServingError: the request was refused, or a choice failed, which ends the others.
        """
        serve = partial(self._choice, request_id, request, trace, metadata or {})
        found = serve(0) if request.num_choices == 1 else self._choices(request.num_choices, serve)
        self._is_ended[request_id] = False
        try:
            async with contextlib.aclosing(found) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._is_ended[request_id]

    async def _choices(
        self, num_choices: int, serve: Callable[[int], AsyncGenerator[Chunk, None]]
    ) -> AsyncGenerator[Chunk, None]:
        queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_WAITING * num_choices)

        async def run(choice: int) -> None:
            async with contextlib.aclosing(serve(choice)) as chunks:
                async for chunk in chunks:
                    await room.acquire()
                    queue.put_nowait(chunk)

        tasks = [asyncio.create_task(run(choice)) for choice in range(num_choices)]
        running = asyncio.gather(*tasks)
        running.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (chunk := await queue.get()) is not None:
                room.release()
                yield chunk
            await running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, running, return_exceptions=True)

    async def _choice(
        self,
        request_id: str,
        request: DirectRequest,
        trace: Mapping[str, str] | None,
        metadata: Mapping[str, str],
        choice: int,
    ) -> AsyncGenerator[Chunk, None]:
        if self._is_ended[request_id]:  # before this choice has begun
            yield list(cancelled(request))[choice]
            return
        served_id = choice_id(request_id, request, choice)
        text: ChoiceText | None = None
        serving = self.server.serve(served_id, request.fields, metadata, choice, trace)
        try:
            async with contextlib.aclosing(serving) as chunks:
                async for chunk in chunks:
                    text = text or ChoiceText(request, self.tokenizer)  # not before the prompt has been checked
                    sent = text.chunk(chunk)
                    if sent is not None:
                        yield {**sent, "index": choice}
                    if text.has_stopped:
                        return
        except InvalidRequest as error:
            name = request.told(error.field)
            if name == error.field:
                raise
            raise InvalidRequest(name, error.problem) from error.__cause__

    def end(self, request_id: str, request: DirectRequest) -> None:
        """End every choice of a request; its stream ends as cancelled."""
        if request_id in self._is_ended:
            self._is_ended[request_id] = True
        for choice in range(request.num_choices):
            self.server.end_request(choice_id(request_id, request, choice))


def choice_id(request_id: str, request: DirectRequest, choice: int) -> str:
    """Id of one choice where it is served."""
    return request_id if request.num_choices == 1 else f"{request_id}.{choice}"
