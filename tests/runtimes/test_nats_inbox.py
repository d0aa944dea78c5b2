"""The inbox of a NATS client, without a server."""

from __future__ import annotations

import asyncio
from typing import cast

from nats.aio.client import Client

from worker.runtimes.nats.client.inbox import Inbox
from worker.runtimes.nats.client.worker_client import WorkerClient
from worker.runtimes.nats.protocol import Subjects


class Connection:
    """Lets others run while it sends, as nats-py does where much waits to be sent."""

    is_closed = False

    def __init__(self) -> None:
        self.subjects: list[str] = []

    async def flush(self, timeout: float) -> None:
        pass

    async def close(self) -> None:
        pass

    def new_inbox(self) -> str:
        return "_INBOX.client"

    async def publish(self, subject: str, headers: dict[str, str] | None = None) -> None:
        await asyncio.sleep(0)
        self.subjects.append(subject)


async def test_answers_resume_though_one_of_them_ends_meanwhile() -> None:
    connection = Connection()
    inbox = Inbox(cast(Client, connection), window=4, lost_s=2.0)
    with inbox.receiver("a", "a", "generate") as first, inbox.receiver("b", "b", "generate") as second:
        first.acknowledge, second.acknowledge = "ack.a", "ack.b"
        with inbox.receiver("c", "c", "generate"):
            resuming = asyncio.create_task(inbox.resume())
            await asyncio.sleep(0)
        await resuming
    assert connection.subjects == ["ack.a", "ack.b"]


async def test_answers_are_cancelled_though_one_of_them_ends_meanwhile() -> None:
    connection, subjects = Connection(), Subjects("tiny", "1")
    client = WorkerClient(cast(Client, connection), subjects, window=4, lost_s=2.0)
    with client._inbox.receiver("a", "a", "generate"), client._inbox.receiver("b", "b", "generate"):
        with client._inbox.receiver("c", "c", "generate"):
            leaving = asyncio.create_task(client.close())
            await asyncio.sleep(0)
        await leaving
    assert connection.subjects == [subjects.cancel(name) for name in "abc"]
