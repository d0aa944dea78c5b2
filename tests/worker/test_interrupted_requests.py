"""A request whose task is cancelled wherever it waits leaves nothing, and its id is free again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from interruptions import END_S, interruptions, nothing_left
from served_worker import serving
from test_nothing_is_left import SETTINGS, Context, what_is_left

from adapters.client import processor, selection
from worker.metrics import OUTCOMES
from worker.migration import boundary_record
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.tiny_model import write_tiny_model

PROMPT = list(range(20, 40))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grammar": {"sampling_options": {"guided_decoding": {"choice": ["yes", "no"]}}, "stop_conditions": {}},
    "companion": {"named": {}, "processors": [processor("cfg", scale=2.0, negative_token_ids=[30, 31])]},
    "deadline": {"named": {"deadline": 3600.0}},
    "stop": {"stop_conditions": {"max_tokens": 12, "stop": ["e", "a", " "]}},
    "both": {"stop_conditions": {"max_tokens": 12, "stop": ["e", "a", " "]}, "named": {"deadline": 3600.0}},
    "refused": {"sampling_options": {"guided_decoding": {"regex": "("}}, "stop_conditions": {}},
    "scores": {"output_options": {"prompt_logprobs": 2, "logprobs": 1}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def _records_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_record, "EXPIRY_S", 0.0)


def raw(kind: str) -> dict[str, Any]:
    given = dict(KINDS[kind])
    processors, named = given.pop("processors", []), dict(given.pop("named", {}))
    if "deadline" in named:
        named["deadline"] += time.time()
    options = {"temperature": 1.0, "seed": 3, **given.pop("sampling_options", {})}
    stops = given.pop("stop_conditions", {"max_tokens": 3, "ignore_eos": True})
    annotations = ["logits_processors:" + selection(*processors, **named)] if processors or named else []
    asked = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 12, **stops}, "sampling_options": options}
    return {**asked, "annotations": annotations, **given}


async def read(worker: WorkerEngine, kind: str) -> list[Any]:
    return [chunk async for chunk in worker.generate(raw(kind), Context("request", "a"))]


async def idle(worker: WorkerEngine, tasks: set[asyncio.Task[Any]], what: object) -> None:
    end_s = time.monotonic() + END_S
    while left := what_is_left(worker, tasks):
        assert time.monotonic() < end_s, f"{what}: {left}"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_request_leaves_nothing(model: Path, tmp_path: Path, kind: str) -> None:
    store = tmp_path / "records"
    async with serving(model, *SETTINGS, "--migration", "on", "--boundary-store", f"file:{store}") as client:
        worker, before = client.worker, asyncio.all_tasks()
        num_begun = 0
        for interruption in interruptions():
            async with nothing_left(interruption):
                task = await interruption.ended(read(worker, kind))
                num_begun += interruption.place > 0 or not interruption.has_come
                if not interruption.has_come:
                    assert not task.cancelled()
                await idle(worker, before, interruption)
            assert not list(store.iterdir()), interruption
        registry = worker.server.metrics.registry
        counted = [registry.get_sample_value("dlw_requests_total", {"outcome": name}) or 0 for name in OUTCOMES]
        assert sum(counted) == num_begun


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("stop", [[], ["e", "a", " "]])
async def test_a_cancelled_message_leaves_nothing(model: Path, num_choices: int, stop: list[str]) -> None:
    async with serving(model, *SETTINGS) as client:
        worker, before = client.worker, asyncio.all_tasks()
        direct = DirectServer(worker.server, worker.server.arguments)
        stops = {"max_tokens": 6, "ignore_eos": True, "stop": stop}
        message = {"token_ids": PROMPT, "stop_conditions": stops, "text": True}
        message["sampling_options"] = {"temperature": 1.0, "n": num_choices}

        async def read() -> list[Any]:
            return [chunk async for chunk in direct.chunks("message", await direct.parsed(message))]

        async def leave() -> None:
            chunks = direct.chunks("message", await direct.parsed(message))
            await anext(chunks)
            await chunks.aclose()

        for work in (read, leave):
            for interruption in interruptions():
                async with nothing_left(interruption):
                    await interruption.ended(work())
                    await idle(worker, before, interruption)
