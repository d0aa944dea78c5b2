"""Answers that a pause aborts, or that are aborted by their id, at --engine-port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from engine_port_client import LONG, Generated, Trainer, trained

from worker.processors.builder import ServedChainBuilder
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    root = tmp_path_factory.mktemp("served")
    async with trained(write_tiny_model(root / "model"), root / "keys.txt") as found:
        yield found


async def test_a_pause_aborts(trainer: Trainer) -> None:
    growing = Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.tell("pause", mode="abort")
    with pytest.raises(Exception, match="was aborted, for its engine's weights change"):
        await task
    await trainer.tell("resume")
    assert len((await trainer.generate(5)).token_ids) == 5


async def test_an_aborted_answer_goes_on(trainer: Trainer) -> None:
    """Behind the tokens so far, where its client gets their ids; also one that has none yet."""
    wants: dict[str, Any] = {"annotations": ["return_token_ids"]}
    whole, growing = await trainer.generate(LONG, **wants), Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing, **wants))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.tell("pause", mode="abort")
    first = await task
    waiting = asyncio.create_task(trainer.generate(7, **wants))
    while not trainer.worker.server.engine.num_unfinished():
        await asyncio.sleep(0.001)
    await trainer.tell("pause", mode="abort")
    (last,) = (await waiting).chunks
    assert (last["token_ids"], last["completion_usage"]["completion_tokens"]) == ([], 0)
    assert json.loads(last["engine_data"]["rollout"])["prompt_token_ids"] == list(range(20, 50))
    await trainer.tell("resume")
    assert 5 <= len(first.token_ids) < LONG
    for chunk in (first.chunks[-1], last):
        assert (chunk["finish_reason"], chunk["engine_data"]["abort"]) == ("cancelled", True)
    rest = await trainer.generate(LONG - len(first.token_ids), behind=first.token_ids, **wants)
    assert first.token_ids + rest.token_ids == whole.token_ids


async def test_a_request_that_is_aborted_by_its_id(trainer: Trainer) -> None:
    """It ends with its tokens so far as well, and says that it is not complete."""
    wants: dict[str, Any] = {"annotations": ["return_token_ids"]}
    growing = Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing, **wants))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    request_id = f"generated-{trainer.num_asked}"
    await trainer.tell("abort_request", request_id=request_id)
    last = (await task).chunks[-1]
    assert (last["finish_reason"], last["engine_data"]["abort"]) == ("cancelled", True)
    assert 5 <= last["completion_usage"]["completion_tokens"] < LONG


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/engine/abort_request", {"abort_all": True}),
        ("/engine/abort_request", {"request_id": ""}),
        ("/engine/pause", {"mode": "abort"}),
        ("/pause_generation", {}),
    ],
)
async def test_an_abort_ends_a_preparation(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """A request whose grammar compiles is one of those that the engine has still to answer."""
    forever = asyncio.Event()

    async def compile_forever(self: ServedChainBuilder, *of_request: object) -> None:
        await forever.wait()

    monkeypatch.setattr(ServedChainBuilder, "prepare", compile_forever)
    wants: dict[str, Any] = {
        "annotations": ["return_token_ids"],
        "sampling_options": {"guided_decoding": {"regex": "a+"}},
    }
    task = asyncio.create_task(trainer.generate(9, **wants))
    while not trainer.worker.server.in_flight:
        await asyncio.sleep(0.001)
    _, loads = await trainer.ask("/v1/loads", method="GET")
    assert loads["loads"][0]["num_total_reqs"] == 1
    named = {name: value or f"generated-{trainer.num_asked}" for name, value in fields.items()}
    status, told = await trainer.ask(path, json.dumps(named).encode())
    assert status == 200, told
    (last,) = (await asyncio.wait_for(task, 10)).chunks
    assert (last["finish_reason"], last["engine_data"]["abort"]) == ("cancelled", True)
    monkeypatch.undo()
    await trainer.tell("resume")
    assert (await trainer.ask("/v1/loads", method="GET"))[1]["loads"][0]["num_total_reqs"] == 0
    assert len((await trainer.generate(5)).token_ids) == 5


async def test_an_abort_ends_a_pause_that_waits(trainer: Trainer) -> None:
    growing = Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(trainer.tell("pause", mode="wait"))
    await asyncio.sleep(0.05)
    status, answer = await trainer.ask("/engine/resume")
    assert (status, answer["message"]) == (409, "an update or a pause is under way")
    await trainer.tell("pause", mode="abort")
    assert (await waiting)["state"] == "paused"
    with pytest.raises(Exception, match="was aborted"):
        await task
    await trainer.tell("resume")


@pytest.mark.parametrize("level", [1, 2])
async def test_an_abort_ends_what_sleeps(trainer: Trainer, level: int) -> None:
    """A request in flight, and one that came after it."""
    wants: dict[str, Any] = {"annotations": ["return_token_ids"]}
    growing = Generated()
    begun = asyncio.create_task(trainer.generate(LONG, growing, **wants))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.tell("sleep", level=level)
    waiting = asyncio.create_task(trainer.generate(7, **wants))
    while trainer.worker.server.engine.num_unfinished() < 2:
        await asyncio.sleep(0.001)
    await trainer.tell("pause", mode="abort")
    ended = await asyncio.wait_for(asyncio.gather(begun, waiting), 10)
    await trainer.tell("wake")
    await trainer.tell("resume")
    assert [one.chunks[-1]["engine_data"]["abort"] for one in ended] == [True, True]
    assert [bool(one.token_ids) for one in ended] == [True, False]
