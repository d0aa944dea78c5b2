"""Inbox of a client: distributes the messages of workers to the answers that are under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nats.aio.client import Client
from nats.aio.msg import Msg

from worker.runtimes.nats.client.errors import ConnectionClosed, WorkerLost
from worker.runtimes.nats.client.receiver import Receiver
from worker.runtimes.nats.protocol import GONE, KIND, RESUME, SEQUENCE


class Inbox:
    """Receivers of the answers under way, by attempt. One event loop only.

    Args:
        connection: Connection to NATS.
        window: Messages that a worker may send ahead of what was read.
        lost_s: Seconds of silence after which a worker is given up.

    Attributes:
        receivers: The receivers.
    """

    def __init__(self, connection: Client, window: int, lost_s: float) -> None:
        self._connection = connection
        self._window = window
        self._lost_s = lost_s
        self._subject = connection.new_inbox()
        self._watch: asyncio.Task[None] | None = None
        self.receivers: dict[str, Receiver] = {}

    async def open(self) -> None:
        """Receive messages from now on."""
        await self._connection.subscribe(f"{self._subject}.*", cb=self._take)
        self._watch = asyncio.create_task(self._give_up_lost_workers())

    def close(self) -> None:
        """Give up no more workers."""
        if self._watch is not None:
            self._watch.cancel()

    @contextmanager
    def receiver(self, attempt: str, request_id: str, asked: str) -> Iterator[Receiver]:
        """Receiver of the answer to one attempt, while it is under way.

        Args:
            attempt: Last token of its reply subject.
            request_id: Id of the request.
            asked: Subject that it is sent to.
        """
        receiver = self.receivers[attempt] = Receiver(request_id, asked, self._window)
        try:
            yield receiver
        finally:
            del self.receivers[attempt]

    def subject(self, attempt: str) -> str:
        """Reply subject of an attempt."""
        return f"{self._subject}.{attempt}"

    async def acknowledge(self, subject: str | None, number: int, kind: str = "") -> None:
        """Tell a worker how far its answer was read, or received with `RESUME`."""
        if subject is not None and not self._connection.is_closed:
            headers = {SEQUENCE: str(number)}
            await self._connection.publish(subject, headers={**headers, KIND: kind} if kind else headers)

    async def tell_gone(self, subject: str | None) -> None:
        """Tell a worker that no client waits for its answer any more."""
        await self.acknowledge(subject, 0, GONE)

    async def resume(self) -> None:
        """Ask for what was sent while the connection was lost."""
        for receiver in tuple(self.receivers.values()):
            receiver.heard_s = time.monotonic()
            await self.acknowledge(receiver.acknowledge, receiver.expected, RESUME)

    def fail(self) -> None:
        """The connection is closed for good: every answer under way ends with an error."""
        for receiver in self.receivers.values():
            receiver.fail(ConnectionClosed())

    async def _take(self, message: Msg) -> None:
        receiver = self.receivers.get(message.subject.rpartition(".")[2])
        if receiver is None:
            await self.tell_gone(message.reply or None)
        elif receiver.take(message):
            await self.acknowledge(receiver.acknowledge, receiver.expected, RESUME)

    async def _give_up_lost_workers(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(self._lost_s / 10)
            before_s, looked_s = looked_s, time.monotonic()
            was_away = not self._connection.is_connected or looked_s - before_s > self._lost_s / 2
            for receiver in self.receivers.values():
                if was_away:  # nothing could be heard: the connection was lost, or this event loop stood still
                    receiver.heard_s = looked_s
                elif looked_s - receiver.heard_s > self._lost_s * 0.9:
                    receiver.fail(WorkerLost(looked_s - receiver.heard_s))
