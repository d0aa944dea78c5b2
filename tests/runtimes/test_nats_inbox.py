"""The inbox of a NATS client, without a server."""

from __future__ import annotations

import asyncio
from typing import cast

from nats.aio.client import Client

from worker.runtimes.nats.client.inbox import Inbox


class Connection:
    """Lets others run while it sends, as nats-py does where much waits to be sent."""

    is_closed = False

    def __init__(self) -> None:
        self.subjects: list[str] = []

    def new_inbox(self) -> str:
        return "_INBOX.client"

    async def publish(self, subject: str, headers: dict[str, str]) -> None:
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
