"""Client's end of one answer."""

from __future__ import annotations

import asyncio
import time

from nats.aio.msg import Msg

from worker.runtimes.nats.client.errors import NoWorkers, RequestError
from worker.runtimes.nats.protocol import END, ERROR, HEARTBEAT, KIND, SEQUENCE


class Receiver:
    """Messages of one answer in order, and the state of their acknowledgement.

    Args:
        request_id: Id of the request.
        asked: Subject that it is sent to.
        window: Messages that a worker may send ahead of what was read.

    Attributes:
        request_id: Id of the request.
        acknowledge: Subject for acknowledgements, None before the first message.
        heard_s: Monotonic time of the last message.
        expected: Number of the next message.
        has_ended: Whether the last message was read.
    """

    def __init__(self, request_id: str, asked: str, window: int) -> None:
        self.request_id = request_id
        self.acknowledge: str | None = None
        self.heard_s = time.monotonic()
        self.expected = 0
        self.has_ended = False
        self._asked = asked
        self._window = window
        self._queue: asyncio.Queue[Msg | RequestError] = asyncio.Queue()
        self._num_read = 0

    def take(self, message: Msg) -> bool:
        """Take a message; whether one before it is missing, so that the worker must resend."""
        headers = message.headers or {}
        self.heard_s = time.monotonic()
        if message.reply:
            self.acknowledge = message.reply
        if headers.get("Status") == "503":
            self.fail(NoWorkers(self._asked))
            return False
        number = int(headers.get(SEQUENCE, "-1"))
        if headers.get(KIND) == HEARTBEAT:
            return number > self.expected
        if number == self.expected:
            self.expected += 1
            self._queue.put_nowait(message)
        return number > self.expected

    def fail(self, error: RequestError) -> None:
        """The answer ends with an error."""
        self._queue.put_nowait(error)

    async def read(self) -> Msg:
        """The next message. Raises `RequestError`."""
        found = await self._queue.get()
        if isinstance(found, RequestError):
            raise found
        self._num_read += 1
        self.has_ended = (found.headers or {}).get(KIND) in (END, ERROR)
        return found

    @property
    def is_acknowledgement_due(self) -> bool:
        """Whether the worker should hear how far this client has read."""
        return self.has_ended or self._num_read % max(1, self._window // 4) == 0

    @property
    def num_read(self) -> int:
        """Messages that were read."""
        return self._num_read
