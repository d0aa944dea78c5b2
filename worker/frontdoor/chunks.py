"""The streamed answers of a frontend to the requests of all choices, as chunks."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.choice_merge import ChoiceMerge
from worker.frontdoor.choice_requests import ChoiceRequests
from worker.frontdoor.errors import Refused, no_answer, unreachable
from worker.frontdoor.frontend_errors import error_of
from worker.frontdoor.stream_events import StreamEvent
from worker.frontdoor.upstreams import Upstreams

MAX_EVENT = 64 * 2**20
"""Bytes of the largest event, and of the largest error."""

MAX_AHEAD = 256
"""Chunks that wait for their reader before the frontends are read no further."""


class Chunks:
    """Asynchronous iterator over the chunks of one answer of one or several choices.

    A chunk has the form of OpenAI's ``chat.completion.chunk``, or of a streamed completion; the
    last one has the usage, if it was asked for.

    Args:
        upstreams: The frontends.
        requests: A request per choice, head and body, each for a stream.

    Attributes:
        annotations: Values of events that Dynamo's frontend sends before the chunks, by name.
    """

    def __init__(self, upstreams: Upstreams, requests: Sequence[bytes]) -> None:
        self._requests = ChoiceRequests(self, requests, self._unreachable)
        self._merge = ChoiceMerge(len(requests))
        self._waiting: deque[dict[str, Any]] = deque()
        self._problem: Refused | None = None
        self._is_complete = False
        self._is_paused = False
        self._news = asyncio.Event()
        self.annotations: dict[str, Any] = {}
        upstreams.reads(self)
        self._requests.ask(upstreams)

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> dict[str, Any]:
        """The next chunk.

        Raises:
            Refused: what the frontend answered instead, or did not: 502 and 503.
        """
        while not self._waiting:
            if self._problem is not None:
                raise self._problem
            if self._is_complete:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        chunk = self._waiting.popleft()
        if self._is_paused and len(self._waiting) < MAX_AHEAD // 2:
            self._is_paused = False
            self._requests.resume()
        return chunk

    def close(self) -> None:
        """End the requests. Idempotent."""
        self._requests.abort()

    def end(self, refused: Refused) -> None:
        """End the requests, with an error for their reader."""
        if not self._is_complete:
            self._fail(refused)

    # A `Whole` of the choices' answers.

    def headed(self, answer: ParsedAnswer) -> None:
        """The head of an answer has come."""
        answer.collects = answer.status != 200 or not answer.is_stream

    def data(self, answer: ParsedAnswer, data: bytes) -> None:
        """Bytes of an answer's body."""
        if self._problem is not None:
            return
        answer.take(data)
        if not answer.collects:
            for event in answer.taken_events():
                self._take(answer.index, event)
        if answer.num_bytes > MAX_EVENT:
            self._fail(no_answer(f"an answer beyond {MAX_EVENT} bytes"))

    def ended(self, answer: ParsedAnswer) -> None:
        """An answer is complete."""
        answer.ended = True
        if self._problem is not None:
            return
        if answer.collects:
            self._fail(error_of(answer.status, answer.body))
            return
        if answer.body.strip():
            self._take(answer.index, answer.body)
        if all(each.ended for each in self._requests.answers):
            if self._merge.usage_chunk is not None:
                self._waiting.append(self._merge.usage_chunk)
            self._is_complete = True
            self._news.set()

    def failed(self, answer: ParsedAnswer, reason: str) -> None:
        """A frontend has gone before the end of its answer."""
        self._fail(no_answer(reason))

    def _unreachable(self) -> None:
        self._fail(unreachable())

    def _fail(self, problem: Refused) -> None:
        if self._problem is None:
            self._problem = problem
            self._requests.abort()
            self._news.set()

    def _take(self, index: int, text: bytes) -> None:
        """Take one event."""
        event = StreamEvent.of(text)
        try:
            if (error := event.named_error) is not None:
                self._fail(error)
            elif event.name and not event.data:
                self.annotations[event.name] = json.loads(event.comment)
                self._news.set()
            elif event.data and event.data != b"[DONE]":
                self._take_chunk(index, json.loads(event.data))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._fail(no_answer("an event is not in OpenAI's form"))

    def _take_chunk(self, index: int, chunk: dict[str, Any]) -> None:
        if "error" in chunk and "choices" not in chunk:
            self._fail(error_of(500, json.dumps(chunk).encode()))
            return
        merged = self._merge.chunk(index, chunk)
        if merged is not None:
            self._waiting.append(merged)
            self._news.set()
        if len(self._waiting) > MAX_AHEAD and not self._is_paused:
            self._is_paused = True
            self._requests.pause()
