"""However requests end, and whenever their clients leave, nothing of them is left: no slot, page,
grammar, task or turn, and each is counted once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dynamo.llm import exceptions
from served_worker import serving

from adapters.client import processor, selection
from adapters.processors.grammar import grammar_cache
from worker.engines.embedded import EmbeddedEngine
from worker.metrics import OUTCOMES
from worker.requests.refusals import ONLY_CHECKED
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.tiny_model import write_tiny_model

SETTINGS = (
    *("--max-num-seqs", "3", "--max-queue", "4", "--kv-block-size", "4", "--context-length", "64"),
    *("--kv-blocks", "40", "--grammar-timeout-s", "0.3"),
)
SLOW = {"json": {"type": "integer", "multipleOf": 99999989}}
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Context:
    """The runtime's part of one request."""

    def __init__(self, request_id: str, client: str | None) -> None:
        self._id = request_id
        self.metadata = {} if client is None else {"client": client}

    def id(self) -> str:
        return self._id

    def trace_headers(self) -> None:
        return None


class Load:
    """Requests of all kinds, of which each client does what it likes."""

    def __init__(self, worker: WorkerEngine, seed: int) -> None:
        self.worker = worker
        self.chance = random.Random(seed)
        self.number = 0
        self.num_begun = 0
        self.ended: Counter[str] = Counter()

    def raw(self) -> dict[str, Any]:
        """A request; some are refused, and some fail later."""
        chance = self.chance
        prompt = chance.choices(range(10, 500), k=chance.choice([1, 5, 17, 40]))
        if chance.random() < 0.3:
            prompt = list(range(20, 60))  # with a prefix hit
        options: dict[str, Any] = {"temperature": 1.0, "seed": self.number}
        stops: dict[str, Any] = {"max_tokens": chance.choice([1, 3, 20]), "ignore_eos": True}
        output: dict[str, Any] = {}
        processors: list[dict[str, Any]] = []
        named: dict[str, Any] = {}
        match chance.randrange(12):
            case 0:
                processors = [processor("cfg", scale=2.0, negative_token_ids=[30, 31, 32, 33, 34])]
            case 1:
                processors = [processor("phrase_ban", phrases=["a", "e", "th"])]
            case 2:
                processors = [processor("allowed_tokens", token_ids=[40]), processor("banned_tokens", token_ids=[40])]
            case 3:
                stops["stop"] = ["e", "a", " "]
            case 4:
                named["deadline"] = time.time() + chance.choice([-1.0, 0.0, 0.01, 0.05])
            case 5:
                del stops["ignore_eos"]
                options["guided_decoding"] = chance.choice([SLOW, {"choice": ["yes", "no"]}, {"regex": "("}])
            case 6:
                output["prompt_logprobs"] = 2
            case 7:
                output["logprobs"] = 3
            case 8:
                options["top_p"] = 7
            case 9:
                processors = [processor("min_tokens", n=2)]
                stops["max_tokens"] = 1
        annotations = ["logits_processors:" + selection(*processors, **named)] if processors or named else []
        if chance.random() < 0.1:
            annotations.append(ONLY_CHECKED)
        asked = {"token_ids": prompt, "stop_conditions": stops, "sampling_options": options}
        return {**asked, "output_options": output, "annotations": annotations}

    async def client(self) -> None:
        """One request, and what becomes of it."""
        chance = self.chance
        self.number += 1
        number = self.number if chance.random() < 0.9 else max(1, self.number - 1)  # an id that may be in use
        context = Context(f"request {number}", chance.choice([None, "a", "a", "b"]))
        stream = self.worker.generate(self.raw(), context)
        how, after = chance.choice(["read", "read", "close", "abort", "abort and read", "forget"]), chance.randrange(4)
        self.num_begun += 1
        count = 0
        try:
            if how != "read" and after == 3:  # while it is prepared, or waits
                first = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(chance.choice([0, 0.001, 0.02]))
                if how.startswith("abort"):
                    await self.worker.abort(context)
                else:
                    first.cancel()
                with suppress(asyncio.CancelledError):
                    await first
            async for _ in stream:
                count += 1
                if how != "read" and count > after:
                    if how.startswith("abort"):
                        await self.worker.abort(context)
                    if how in ("close", "abort", "forget"):
                        break
                if chance.random() < 0.05:
                    await asyncio.sleep(0.02)  # it does not keep up
            if how in ("close", "abort"):
                await stream.aclose()
        except StopAsyncIteration:
            pass
        except (exceptions.DynamoException, exceptions.HttpError) as error:
            self.ended[type(error).__name__] += 1

    async def run(self, count: int) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for _ in range(count):
            task = asyncio.create_task(self.client())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            while len(tasks) > self.chance.choice([2, 8, 16]):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(self.chance.choice([0, 0, 0.002]))
        await asyncio.gather(*tasks)


def what_is_left(worker: WorkerEngine, tasks: set[asyncio.Task[Any]]) -> dict[str, object]:
    """All that requests hold, by what it is; nothing that is 0, or empty."""
    server, engine = worker.server, worker.server.engine
    assert isinstance(engine, EmbeddedEngine)
    assert engine._stepper is not None
    stepper, chains = engine._stepper, server.chains
    sandbox = grammar_cache(chains.vocabulary).sandbox
    assert sandbox is not None
    held = {
        "in flight": len(server.in_flight),
        "blocks counted": server.in_flight.num_blocks,
        "prepared": len(server._preparing),
        "streams": engine.num_unfinished(),
        "behind": len(engine._streams._behind),
        "queues": list(stepper.scheduler.queues.live) + stepper.scheduler.queues.pinned,
        "blocks used": stepper.scheduler.cache.num_used_blocks,
        "tapped": stepper._tapped,
        "held outputs": stepper._held._held,
        "suspects": getattr(stepper.sampler, "_suspects", ()),
        "grammars": sandbox.num_running + sandbox.num_waiting,
        "turns": chains._turns._waiting or chains._turns._taken,
        "tasks": asyncio.all_tasks() - tasks,
    }
    return {name: what for name, what in held.items() if what}


@pytest.mark.parametrize("seed", range(2))
async def test_nothing_is_left_of_requests(model: Path, seed: int) -> None:
    async with serving(model, *SETTINGS) as client:
        worker = client.worker
        assert isinstance(worker.server.engine, EmbeddedEngine)
        before = asyncio.all_tasks()
        load = Load(worker, seed)
        async with asyncio.timeout(WAIT_S):
            await load.run(100)
            while what_is_left(worker, before):
                await asyncio.sleep(0.01)
        stepper = worker.server.engine._stepper
        assert stepper is not None
        stepper.scheduler.check_integrity()
        registry = worker.server.metrics.registry
        counted = {name: registry.get_sample_value("dlw_requests_total", {"outcome": name}) or 0 for name in OUTCOMES}
        assert sum(counted.values()) == load.num_begun, counted
