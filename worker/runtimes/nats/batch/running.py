"""Requests of batches that are being answered, and the reasons for which one ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from nats.aio.msg import Msg

from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.direct.server import choice_id
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.layout import QueuedRequest
from worker.runtimes.nats.protocol import Malformed
from worker.server import RequestServer

ONLINE_PART = 8
"""One slot of this many stays free for requests that clients wait for."""


class Returned(Exception):
    """The request goes back to the queue, through no fault of its own."""


class Cancelled(Exception):
    """The batch of the request was cancelled."""


class Expired(Exception):
    """The deadline of the request has passed."""


Place = tuple[str, int]
"""Stream and sequence number of a message: the same each time that it is delivered."""


def place_of(message: Msg) -> Place:
    """The place of a message. Raises `NatsError` or `ValueError` if it came from no queue."""
    return message.metadata.stream, message.metadata.sequence.stream


class RunningRequest:
    """One request that is being answered.

    Attributes:
        message: The message, as it was delivered last.
        request: The request in it.
        id: Id of the request on this worker.
        parsed: The request with its prompt, once that has been read.
        ends_as: Reason for which it ends early.
        task: Task that answers it.
        has_begun: Whether the task has begun; one that is cancelled before does nothing at all.
    """

    def __init__(self, message: Msg, request: QueuedRequest) -> None:
        self.message = message
        self.request = request
        self.id = f"{request.batch}/{layout.digest(request.custom_id.encode())}"  # no client's request can have it
        self.parsed: DirectRequest | None = None
        self.ends_as: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False

    @classmethod
    def read(cls, message: Msg) -> RunningRequest:
        """Raises `Malformed` for a message that is no request, or not of its subject's batch."""
        request = QueuedRequest.from_bytes(message.data)
        if message.subject.rpartition(".")[2] != request.batch:
            raise Malformed(f"batch is {request.batch!r}, and the subject is {message.subject[:200]!r}")
        return cls(message, request)

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
            if self.has_begun:
                self.task.cancel()


class Slots:
    """The engine's slots that online requests leave to batches.

    Args:
        server: Server of all requests.
        running: Requests of batches that are being answered.
    """

    def __init__(self, server: RequestServer, running: Mapping[Place, RunningRequest]) -> None:
        self._server = server
        self._running = running

    @property
    def num_free(self) -> int:
        """Requests that may be fetched now."""
        slots = self._server.info.num_slots
        kept = max(1, slots // ONLINE_PART) if slots > 1 else 0
        return max(0, slots - kept - self._num_online - sum(each.num_choices for each in self._running.values()))

    @property
    def num_missing(self) -> int:
        """Slots that online requests wait for."""
        return min(len(self._server.in_flight) - self._server.info.num_slots, self._num_online)

    @property
    def _num_online(self) -> int:
        """Requests in flight that clients wait for."""
        in_flight = self._server.in_flight
        ours = sum(one in in_flight for each in self._running.values() for one in each.served_ids)
        return len(in_flight) - ours
