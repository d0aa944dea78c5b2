"""Connections to NATS of callers that leave, and heartbeats beside a socket that breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from interruptions import END_S, interruptions, nothing_left

from worker.runtimes.nats import open_answers
from worker.runtimes.nats.client import WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions, connect, disconnect
from worker.runtimes.nats.open_answers import OpenAnswers

INFO = {"server_id": "x", "version": "2.10.0", "max_payload": 2**20, "headers": True, "proto": 1}


class Server:
    """A server that greets its clients, and answers their pings."""

    def __init__(self) -> None:
        self.num_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            writer.write(b"INFO %b\r\n" % json.dumps(INFO).encode())
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        except ConnectionError:
            pass
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Server, ConnectionOptions]]:
    server = Server()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    try:
        yield server, ConnectionOptions(url=f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    finally:
        listening.close()


async def a_connection(options: ConnectionOptions) -> Callable[[], Awaitable[None]]:
    client = await connect(options, "test")
    return lambda: disconnect(client)


async def a_client(options: ConnectionOptions) -> Callable[[], Awaitable[None]]:
    return (await WorkerClient.connect("m", options=options)).close


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py closes the transport, not the writer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("made", [a_connection, a_client])
async def test_a_caller_that_leaves_leaves_no_connection(made: Any) -> None:
    async with served() as (server, options):
        for interruption in interruptions():
            async with nothing_left(interruption), asyncio.timeout(END_S):
                task = await interruption.ended(made(options))
                if not task.cancelled():
                    await task.result()()
            assert not server.num_open, interruption


async def test_heartbeats_outlive_a_socket_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them all clients of the worker would give it up, and none that hangs would end."""
    monkeypatch.setattr(open_answers, "HEARTBEAT_S", 0.0)
    beats = asyncio.Semaphore(0)

    async def heartbeat() -> None:
        beats.release()
        raise ConnectionResetError

    answers = OpenAnswers(lambda *_: None)
    answers.streams["a"] = SimpleNamespace(is_settled=False, heartbeat=heartbeat)  # type: ignore[assignment]
    beating = asyncio.create_task(answers.send_heartbeats())
    async with asyncio.timeout(END_S):
        for _ in range(3):
            await beats.acquire()
    beating.cancel()
    await asyncio.wait({beating})
