"""Answers of this worker that have not ended, or whose ends are not acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.nats.protocol import HEARTBEAT_S
from worker.runtimes.nats.stream import AnswerStream


class OpenAnswers:
    """Streams of answers by request id, with the requests that are running. One event loop only.

    Args:
        end: Ends a running request whose client has gone or has cancelled it.

    Attributes:
        streams: The streams.
    """

    def __init__(self, end: Callable[[str, DirectRequest], None]) -> None:
        self._end = end
        self._running: dict[str, DirectRequest | None] = {}  # None while the prompt is read
        self._cancelled: set[str] = set()
        self.streams: dict[str, AnswerStream] = {}

    @contextlib.contextmanager
    def running(self, request_id: str, stream: AnswerStream) -> Iterator[None]:
        """A request runs; afterwards its stream stays until it is settled."""
        self.streams[request_id], self._running[request_id] = stream, None
        try:
            yield
        finally:
            del self._running[request_id]
            self._cancelled.discard(request_id)
            self._drop_settled(request_id, stream)

    def begin(self, request_id: str, request: DirectRequest) -> bool:
        """Note the request once its prompt has been read; False if it is cancelled already."""
        self._running[request_id] = request
        return not (self.streams[request_id].is_gone or request_id in self._cancelled)

    def end(self, request_id: str) -> None:
        """End a request if it runs."""
        request = self._running.get(request_id)
        if request is not None:
            self._end(request_id, request)
        elif request_id in self._running:
            self._cancelled.add(request_id)

    async def cancel(self, message: Msg) -> None:
        """Take a cancellation from its subject."""
        self.end(message.subject.rpartition(".")[2])

    async def acknowledge(self, message: Msg) -> None:
        """Take an acknowledgement from its subject."""
        request_id = message.subject.rpartition(".")[2]
        stream = self.streams.get(request_id)
        if stream is not None:
            await stream.acknowledged(message.headers or {})
            self._drop_settled(request_id, stream)

    async def send_heartbeats(self) -> None:
        """Send heartbeats of all streams, for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            for request_id, stream in list(self.streams.items()):
                with contextlib.suppress(NatsError, OSError):  # a socket that is being replaced, too
                    await stream.heartbeat()
                self._drop_settled(request_id, stream)

    @property
    def are_settled(self) -> bool:
        """Whether every answer has been sent and acknowledged."""
        return all(stream.is_settled for stream in self.streams.values())

    def _drop_settled(self, request_id: str, stream: AnswerStream) -> None:
        if stream.is_settled and request_id not in self._running:
            self.streams.pop(request_id, None)
