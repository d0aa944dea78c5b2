"""Adapters and updated weights of workers behind the front door that asks them itself: an answer
goes on only where it is computed as it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_doors import CHAT, HELLO, ScriptedWorker, ask, door, events, finish, refusal, token
from lora_adapters import write_adapter
from openengine_workers import running
from ports import free_port
from safetensors.torch import load_file, save

from worker.engines.weights import ChangesWeights
from worker.errors import Draining, InvalidRequest
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.runtime import OpenEngineWorker

LEAVES = ("--drain-timeout-s", "0.001")
LONG: dict[str, Any] = {"messages": HELLO, "temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 300}

Pool = tuple[OpenEngineWorker, OpenEngineWorker, httpx.AsyncClient]


@contextlib.asynccontextmanager
async def pool(model: Path, *options: tuple[str, ...]) -> AsyncIterator[Pool]:
    """Two workers with options of their own, and a client of the front door before them."""
    async with running(model, *LEAVES, *options[0]) as one, running(model, *LEAVES, *options[-1]) as other:
        urls = [f"grpc://127.0.0.1:{each.port}" for each in (one, other)]
        async with door(model, *urls) as client:
            yield one, other, client


async def moved(workers: Pool, **fields: Any) -> list[Any]:
    """The events of a long answer whose first worker leaves in the middle."""
    one, other, client = workers
    found: list[Any] = []
    async for each in events(client, CHAT, **LONG, **fields):
        found.append(each)
        if len(found) == 5:
            (one if len(one.server.in_flight) else other).shut_down()
    return found


def text_of(found: list[Any]) -> str:
    """The text of events, none of which is an error."""
    assert not any("error" in each for each in found), found[-1]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in found)


async def update(worker: OpenEngineWorker, tensors: dict[str, torch.Tensor]) -> None:
    engine = worker.server.engine
    assert isinstance(engine, ChangesWeights)
    assert engine.weights is not None
    await engine.weights.update_weights(memoryview(bytearray(save(tensors))), None, "keep")


async def test_adapters_are_models(tiny_model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql", tiny_model, size=1.0)
    async with pool(tiny_model, ("--lora-modules", f"sql={path}")) as workers:
        client = workers[2]
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [("sql", "tiny"), ("tiny", None)]
        still = text_of([each async for each in events(client, CHAT, **LONG, model="sql")])
        assert still != text_of([each async for each in events(client, CHAT, **LONG)])
        assert text_of(await moved(workers, model="sql")) == still


async def test_an_answer_does_not_go_on_with_another_adapter(tiny_model: Path, tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / str(seed), tiny_model, seed=seed) for seed in range(2)]
    async with pool(tiny_model, *(("--lora-modules", f"sql={path}") for path in paths)) as workers:
        found = await moved(workers, model="sql")
        assert "no worker that is ready computes the answer as it began" in found[-1]["error"]["message"]
        assert "continues.adapter: must be" in found[-1]["error"]["message"]


@pytest.mark.parametrize("is_updated", [True, False])
async def test_an_answer_does_not_go_on_with_other_weights(tiny_model: Path, tmp_path: Path, is_updated: bool) -> None:
    """It does where the other worker has had the same update."""
    new = {name: each * 1.5 for name, each in load_file(tiny_model / "model.safetensors").items() if "mlp" in name}
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    ports = [("--engine-port", str(free_port()), "--engine-key-file", str(keys)) for _ in range(2)]
    async with pool(tiny_model, *ports) as workers:
        one, other, client = workers
        await update(one, new)
        if is_updated:
            await update(other, new)
            still = text_of([each async for each in events(client, CHAT, **LONG)])
        found = await moved(workers)
        if is_updated:
            assert text_of(found) == still
        else:
            assert "continues.weights: must be" in found[-1]["error"]["message"]


async def test_a_worker_with_other_weights_is_passed_over(tiny_model: Path) -> None:
    begun = token(40)
    begun.computed_with.weights = "new"

    async def dies(request: wire.GenerateRequest, context: Any) -> None:
        await context.write(begun)
        raise Draining("leaving")

    async def refuses(request: wire.GenerateRequest, context: Any) -> None:
        raise InvalidRequest("extra.continues.weights", "must be '', this worker's, got 'new'")

    async def ends(request: wire.GenerateRequest, context: Any) -> None:
        await context.write(token(41))
        await context.write(finish())

    first, *others = (ScriptedWorker(dies), ScriptedWorker(refuses, load=1), ScriptedWorker(ends, load=2))
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(each.serving()) for each in (first, *others)]
        client = await stack.enter_async_context(door(tiny_model, *urls))
        answer = await ask(client, messages=HELLO)
        assert answer["choices"][0]["message"]["content"] == "DE"
    assert "computed_with" in first.requests[0].extra["annotations"]
    for each in others:
        assert each.requests[0].extra["continues"]["weights"] == "new"


@pytest.mark.parametrize("is_same", [True, False])
async def test_an_answer_goes_on_only_under_its_controls(tiny_model: Path, tmp_path: Path, is_same: bool) -> None:
    """Workers with another policy of the operator's."""
    policies = [tmp_path / f"{number}.yaml" for number in (0, int(not is_same))]
    for number, path in enumerate(policies):
        n = 3 if is_same else 3 + number
        path.write_text(f'models: {{"*": {{default: [{{name: no_repeat_ngram, args: {{n: {n}}}}}]}}}}')
    async with pool(tiny_model, *(("--processor-policy", str(path)) for path in policies)) as workers:
        found = await moved(workers)
        if is_same:
            still = text_of([each async for each in events(workers[2], CHAT, **LONG)])
            assert text_of(found) == still
        else:
            message = found[-1]["error"]["message"]
            assert "no worker that is ready computes the answer as it began" in message
            assert "continues.controls: added_controls must be" in message


@pytest.mark.parametrize("max_tokens", [300, 2000])
async def test_an_answer_goes_on_only_where_it_has_room(tiny_model: Path, max_tokens: int) -> None:
    async with pool(tiny_model, *(("--context-length", size) for size in ("2048", "1024"))) as (one, other, client):
        asked = LONG | {"max_tokens": max_tokens}
        found: list[Any] = []
        async for each in events(client, CHAT, **asked):
            found.append(each)
            if len(found) == 5:
                is_small = bool(len(other.server.in_flight))
                (other if is_small else one).shut_down()
        if max_tokens == 300:
            assert text_of(found)
        else:
            assert "continues.controls: added_controls must be" in found[-1]["error"]["message"]


async def test_a_worker_with_another_tokenizer_is_given_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """It was started again with another model under the same name, and the front door was not."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    one, two = (name for name, number in vocabulary.items() if number in (100, 101))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(content))
    async with running(other) as worker, door(tiny_model, f"grpc://127.0.0.1:{worker.port}", num_ready=0) as client:
        async with asyncio.timeout(30):
            while "its tokens have the digest" not in (answer := await refusal(client))[1]["message"]:
                assert answer[0] == 503
                await asyncio.sleep(0.1)


async def test_an_answer_does_not_go_on_with_another_checkpoint(tiny_model: Path) -> None:
    """Where it was begun. A worker may have been started again under the same name."""
    does_begin = True

    async def leaves(request: wire.GenerateRequest, context: Any) -> None:
        if does_begin:
            await context.write(token(40))
        raise Draining("leaving")

    first, other = ScriptedWorker(leaves, model_digest="5f2a"), ScriptedWorker(load=1, model_digest="80c1")
    async with first.serving() as url, other.serving() as other_url, door(tiny_model, url, other_url) as client:
        status, error = await refusal(client)
        assert (status, other.requests) == (503, [])
        assert "computes the answer as it began: exact, KV of float32, model 5f2a" in error["message"]
    does_begin = False
    async with first.serving() as url, other.serving() as other_url, door(tiny_model, url, other_url) as client:
        assert (await ask(client, messages=HELLO))["choices"][0]["message"]["content"] == "DE"
        assert len(other.requests) == 1
