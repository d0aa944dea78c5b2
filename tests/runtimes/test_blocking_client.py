"""`BlockingWorkerClient`, whose calls a user interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from worker.runtimes.nats.client import WorkerClient
from worker.runtimes.nats.client.blocking import BlockingWorkerClient

WAIT_S = 20.0


class Client:
    """A client whose answers do not end, and take a moment to be given up."""

    def __init__(self) -> None:
        self.num_open = 0
        self.waits, self.left = threading.Event(), threading.Event()

    async def stream(self, **_: Any) -> AsyncGenerator[dict[str, Any], None]:
        self.num_open += 1
        try:
            yield {"token_ids": [1]}
            self.waits.set()
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            self.num_open -= 1
            self.left.set()

    async def generate(self, **_: Any) -> None:
        async for _chunk in self.stream():
            pass

    async def close(self) -> None:
        assert not self.num_open


@pytest.mark.parametrize("method", ["stream", "generate"])
def test_an_interrupt_gives_the_answer_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is told, and the caller gets the interrupt."""
    client = Client()

    async def connect(*_: Any, **__: Any) -> Client:
        return client

    def interrupt() -> None:
        if client.waits.wait(WAIT_S):
            time.sleep(0.1)  # the main thread waits by then: Python misses a signal that comes as it begins to
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(WorkerClient, "connect", connect)
    with BlockingWorkerClient("m") as blocked:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            list(blocked.stream()) if method == "stream" else blocked.generate()
        assert client.left.wait(WAIT_S)
