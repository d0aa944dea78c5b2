"""Requests of batches on NATS that end early, at any moment: each is handed back, or answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker.arguments import parse_arguments
from worker.lifecycle.drain import InFlightRequests
from worker.metrics import WorkerMetrics
from worker.runtimes.nats.batch import consumer as module
from worker.runtimes.nats.batch.answerer import BatchAnswerer
from worker.runtimes.nats.batch.consumer import BatchConsumer
from worker.runtimes.nats.batch.layout import QueuedRequest
from worker.runtimes.nats.batch.running import Cancelled, Returned, RunningRequest
from worker.server.reports import RequestReports

REQUEST = QueuedRequest("batch", 0, "one", "/v1/completions", {"prompt": "a", "max_tokens": 1})


class Storage:
    """Records what becomes of a message."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def has_result(self, request: Any) -> bool:
        await asyncio.sleep(0)
        return "result" in self.said

    async def returns(self, request: Any) -> int:
        return 0

    async def write_result(self, request: Any, line: Any) -> None:
        await asyncio.sleep(0)
        self.said.append("result")

    async def acknowledge(self, message: Any) -> None:
        await asyncio.sleep(0)
        self.said.append("acknowledged")

    async def end(self, message: Any) -> None:
        self.said.append("ended")

    async def hand_back(self, message: Any, request: Any, delay_s: float) -> None:
        await asyncio.sleep(0)
        self.said.append("handed back")


class Messages:
    """A server of messages that answers in a few turns of the loop."""

    def __init__(self) -> None:
        vocabulary = SimpleNamespace(tokenizer=None, hidden_token_ids=frozenset())
        reports = RequestReports("m", WorkerMetrics(InFlightRequests()))
        self.server = SimpleNamespace(chains=SimpleNamespace(vocabulary=vocabulary), reports=reports)

    async def parsed(self, message: Any) -> Any:
        await asyncio.sleep(0)
        return SimpleNamespace(num_choices=1)

    async def chunks(self, request_id: str, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        await asyncio.sleep(0)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        yield {"token_ids": [5], "index": 0, "text": "a", "finish_reason": "length", "completion_usage": usage}


@pytest.mark.parametrize("reason", [Returned(), Cancelled()])
async def test_a_request_may_end_before_it_has_begun(reason: Exception) -> None:
    for steps in range(40):
        storage = Storage()
        answerer = BatchAnswerer(cast(Any, Messages()), cast(Any, storage), 3)
        message = SimpleNamespace(metadata=SimpleNamespace(num_delivered=1))
        running = RunningRequest(cast(Any, message), REQUEST)
        running.task = asyncio.create_task(answerer.run(running))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.end(reason)
        await asyncio.wait({running.task})
        ends = [each for each in storage.said if each != "result"]
        assert ends, f"after {steps} turns of the loop nothing became of it"
        if "acknowledged" in ends:
            assert "result" in storage.said


class Queue:
    """A queue that has two requests, which take a few turns of the loop to come."""

    ack_wait_s = 60.0

    def __init__(self) -> None:
        self.given: list[Any] = []

    async def fetch(self, number: int) -> list[Any]:
        for _ in range(5):
            await asyncio.sleep(0)
        if self.given:
            return []
        for sequence in (1, 2):
            place = SimpleNamespace(stream="s", sequence=SimpleNamespace(stream=sequence), num_delivered=1)
            data = QueuedRequest("batch", sequence, str(sequence), "/v1/completions", {"prompt": "a"}).as_bytes()
            self.given.append(SimpleNamespace(metadata=place, data=data, subject="q.batch"))
        for _ in range(3):
            await asyncio.sleep(0)
        return self.given


def consuming(storage: Storage, queue: Any) -> BatchConsumer:
    """A consumer that fetches."""
    messages = Messages()
    messages.server.info = SimpleNamespace(num_slots=8)
    messages.server.in_flight = []
    arguments = parse_arguments(["--model-path", "/m", "--runtime", "nats", "--batch"], {})
    consumer = BatchConsumer(cast(Any, messages), arguments)
    consumer._client = cast(Any, SimpleNamespace(is_connected=True))
    consumer._answerer = BatchAnswerer(cast(Any, messages), cast(Any, storage), 3)
    consumer._queues = [queue]
    consumer._loops.begin("fetch", consumer._fetch_some)
    return consumer


async def test_what_comes_as_a_worker_leaves_is_given_back() -> None:
    """Another worker gets it at once, and it does not count as a failure."""
    for steps in range(40):
        storage, queue = Storage(), Queue()
        consumer = consuming(storage, queue)
        for _ in range(steps):
            await asyncio.sleep(0)
        await consumer.stop()
        ends = [each for each in storage.said if each != "result"]
        assert len(ends) == len(queue.given), f"after {steps} turns of the loop: {storage.said}"


class SilentQueue(Queue):
    """A queue of which nothing is heard behind its requests."""

    async def fetch(self, number: int) -> list[Any]:
        if self.given:
            await asyncio.sleep(3600)
        return await super().fetch(number)


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_silent_server_holds_a_leaving_worker_up_once(is_away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is answered is given back beside the wait for what is being fetched."""
    monkeypatch.setattr(module, "STOP_S", 1.0)
    storage, forever = Storage(), asyncio.Event()

    async def hold(*_: Any) -> None:
        await forever.wait()

    monkeypatch.setattr(Messages, "parsed", hold)  # what is answered takes its time
    if is_away:
        monkeypatch.setattr(storage, "hand_back", hold)
    consumer = consuming(storage, SilentQueue())
    async with asyncio.timeout(20):
        while len(consumer._running) < 2 or not all(each.has_begun for each in consumer._running.values()):
            await asyncio.sleep(0)
    began_s = asyncio.get_running_loop().time()
    stopping = asyncio.create_task(consumer.stop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert storage.said == ([] if is_away else ["handed back"] * 2)
    assert not stopping.done()
    await stopping
    assert asyncio.get_running_loop().time() - began_s < 1.8
