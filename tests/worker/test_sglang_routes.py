"""SGLang's routes at --engine-port, as slime and verl call them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_port_client import BYTES_OPTIONS, LONG, Generated, Trainer, tensors_of, trained
from safetensors.torch import save

from worker import __version__
from worker.server.sglang_routes import REFUSED
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

WANTS: dict[str, Any] = {"annotations": ["return_token_ids"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed) for seed in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    async with trained(models[0], tmp_path_factory.mktemp("keys") / "keys.txt") as found:
        yield found


async def post(trainer: Trainer, path: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    status, answer = await trainer.ask(path, json.dumps(fields or {}).encode())
    assert status == 200, answer
    return answer


async def get(trainer: Trainer, path: str) -> dict[str, Any]:
    status, answer = await trainer.ask(path, method="GET")
    assert status == 200, answer
    return answer


async def begun(trainer: Trainer, count: int, seed: int = 1) -> tuple[asyncio.Task[Generated], Generated]:
    growing = Generated()
    task = asyncio.create_task(trainer.generate(count, growing, seed, **WANTS))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    return task, growing


async def test_a_trainer_finds_its_engine(trainer: Trainer, models: list[Path]) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = await get(trainer, path)
        assert (info["tp_size"], info["pp_size"], info["num_gpus"], info["disaggregation_mode"]) == (1, 1, 1, "null")
        assert (info["enable_memory_saver"], info["version"]) == (False, __version__)
    for path in ("/model_info", "/get_model_info"):
        info = await get(trainer, path)
        assert (info["model_path"], info["is_generation"]) == (str(models[0]), True)
    version = (await trainer.tell("get_weight_version"))["version"]
    assert (await get(trainer, "/get_weight_version"))["weight_version"] == info["weight_version"] == version


async def test_slime_aborts_until_it_is_idle(trainer: Trainer) -> None:
    """All end with their tokens so far, and the engine serves on."""
    whole = await trainer.generate(300, **WANTS)
    tasks = [await begun(trainer, LONG, seed) for seed in (1, 2, 3)]
    assert await get(trainer, "/v1/loads?include=core") | {"status": "ok"} == {
        "status": "ok",
        "dp_rank_count": 1,
        "loads": [{"dp_rank": 0, "num_total_reqs": 3}],
    }
    await post(trainer, "/abort_request", {"abort_all": True})
    while (await get(trainer, "/v1/loads?include=core"))["loads"][0]["num_total_reqs"]:
        await asyncio.sleep(0.001)
    for task, growing in tasks:
        last = (await task).chunks[-1]
        assert (last["finish_reason"], last["engine_data"]["abort"]) == ("cancelled", True)
        assert 5 <= len(growing.token_ids) < LONG
    first = tasks[0][1].token_ids[:300]
    rest = await trainer.generate(300 - len(first), behind=first, **WANTS)
    assert first + rest.token_ids == whole.token_ids


@pytest.mark.parametrize("fields", [{"rid": ""}, {}, {"rid": 3}, {"abort_all": 1}, {"rid": "a", "reason": "b"}])
async def test_an_abort_names_what_is_wrong(trainer: Trainer, fields: dict[str, Any]) -> None:
    status, answer = await trainer.ask("/abort_request", json.dumps(fields).encode())
    assert (status, answer["status"]) == (400, "error")
    assert answer["message"].startswith(("rid:", "abort_all:", "'reason':", "reason:")), answer


async def test_one_is_aborted_by_its_id(trainer: Trainer) -> None:
    (task, _), (other, _) = await begun(trainer, LONG), await begun(trainer, 200, 2)
    await post(trainer, "/abort_request", {"rid": f"generated-{trainer.num_asked - 1}", "abort_all": False})
    assert (await task).chunks[-1]["engine_data"]["abort"]
    assert len((await other).token_ids) == 200


async def test_slime_pauses_updates_and_continues(trainer: Trainer, models: list[Path]) -> None:
    """Its sequence of an update from disk: pause, flush, update, continue; a pause aborts."""
    before = await trainer.generate(20, **WANTS)
    task, _ = await begun(trainer, LONG)
    assert (await post(trainer, "/pause_generation"))["message"] == "Generation paused successfully."
    assert (await task).chunks[-1]["engine_data"]["abort"]
    assert (await trainer.ask("/health_generate", method="GET"))[0] == 409
    await get(trainer, "/flush_cache")
    update = {"model_path": str(models[1]), "load_format": None, "weight_version": "7"}
    answer = await post(trainer, "/update_weights_from_disk", update)
    assert (answer["success"], answer["num_paused_requests"]) == (True, 0)
    waiting = asyncio.create_task(trainer.generate(20, **WANTS))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await post(trainer, "/continue_generation", {})
    await get(trainer, "/health_generate")
    assert (await get(trainer, "/get_weight_version"))["weight_version"] == "7"
    assert (await waiting).token_ids != before.token_ids
    await trainer.tell("update_weights_from_disk", model_path=str(models[0]))
    assert (await trainer.generate(20, **WANTS)).token_ids == before.token_ids


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_that_keeps_requests(trainer: Trainer, mode: str) -> None:
    whole = await trainer.generate(200)
    task, growing = await begun(trainer, 200)
    await post(trainer, "/pause_generation", {"mode": mode})
    so_far = len(growing.token_ids)
    await asyncio.sleep(0.05)
    assert len(growing.token_ids) <= so_far + 64
    await post(trainer, "/continue_generation", {})
    assert (await task).token_ids == whole.token_ids


async def test_an_update_waits_or_aborts(trainer: Trainer, models: list[Path]) -> None:
    for aborts in (False, True):
        task, _ = await begun(trainer, LONG)
        fields = {"model_path": str(models[0]), "abort_all_requests": aborts, "flush_cache": True}
        fields |= {"is_async": False, "keep_pause": False}
        await post(trainer, "/update_weights_from_disk", fields)
        answer = await task
        assert answer.chunks[-1]["engine_data"].get("abort", False) == aborts
        assert len({each["version"] for each in answer.versions}) == 1


@pytest.mark.parametrize("aborts", [False, True])
async def test_an_update_in_a_pause_aborts_or_keeps(trainer: Trainer, models: list[Path], aborts: bool) -> None:
    """SGLang's waits for nothing there: what the pause keeps goes on behind it."""
    task, _ = await begun(trainer, LONG)
    await post(trainer, "/pause_generation", {"mode": "retract"})
    fields = {"model_path": str(models[0]), "abort_all_requests": aborts}
    await asyncio.wait_for(post(trainer, "/update_weights_from_disk", fields), 10)
    if aborts:
        await asyncio.wait_for(asyncio.shield(task), 10)
    await post(trainer, "/continue_generation")
    answer = await task
    assert answer.chunks[-1]["engine_data"].get("abort", False) == aborts
    assert len(answer.versions) == (1 if aborts else 2)


async def test_verl_releases_and_resumes_memory(trainer: Trainer, models: list[Path]) -> None:
    """Both kinds at once, weights back first, then an update, then the KV cache."""
    before = await trainer.generate(20)
    await post(trainer, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert (await trainer.tell("get_weight_version"))["state"] == "asleep"
    assert (await trainer.ask("/release_memory_occupation"))[0] == 409
    await post(trainer, "/resume_memory_occupation", {"tags": ["weights"]})
    body = save(tensors_of(models[0]))
    assert (await trainer.ask("/engine/update_weights", body, **BYTES_OPTIONS))[0] == 200
    await post(trainer, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (await trainer.generate(20)).token_ids == before.token_ids
    await post(trainer, "/release_memory_occupation", {"tags": ["kv_cache"]})
    await post(trainer, "/resume_memory_occupation", {"tags": None})
    await post(trainer, "/release_memory_occupation", {"tags": ["cuda_graph"]})
    assert (await trainer.generate(20)).token_ids == before.token_ids


@pytest.mark.parametrize(
    ("path", "fields", "status", "named"),
    [
        ("/pause_generation", {"mode": "keep"}, 400, "mode"),
        ("/pause_generation", {"modes": "abort"}, 400, "'modes'"),
        ("/release_memory_occupation", {"tags": ["weights"]}, 501, "tags"),
        ("/release_memory_occupation", {"tags": []}, 400, "tags"),
        ("/resume_memory_occupation", {"tags": ["kv"]}, 400, "tags"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "dummy"}, 400, "load_format"),
        ("/update_weights_from_disk", {"model_path": "/x", "flush_cache": False}, 400, "flush_cache"),
        ("/update_weights_from_disk", {"model_path": "/x", "is_async": True}, 400, "is_async"),
        ("/update_weights_from_disk", {"model_path": "/x", "keep_pause": True}, 400, "keep_pause"),
        ("/update_weights_from_disk", {"model_path": "/no/such"}, 400, "model_path"),
        ("/update_weights_from_disk", {}, 400, "model_path"),
    ],
)
async def test_what_is_not_taken_is_named(
    trainer: Trainer, path: str, fields: dict[str, Any], status: int, named: str
) -> None:
    found, answer = await trainer.ask(path, json.dumps(fields).encode())
    assert (found, answer["status"]) == (status, "error")
    assert named.strip("'") in answer["message"]


async def test_what_is_not_here_says_what_is(trainer: Trainer) -> None:
    for path, instead in REFUSED.items():
        status, answer = await trainer.ask(path)
        assert status == 404
        assert f"{path} is not here: {instead}" in answer["message"]
    assert (await trainer.ask("/abort_request", method="GET"))[0] == 405
    for path in ("/abort", "/v1/abort_request", "/engine/continue_generation", "/engine//pause"):
        assert (await trainer.ask(path))[0] == 404
    assert (await trainer.ask("/server_info", method="GET", key=None))[0] == 401


async def test_all_are_aborted_by_our_own_route(trainer: Trainer) -> None:
    task, _ = await begun(trainer, LONG)
    assert (await trainer.tell("abort_request", abort_all=True))["abort_all"] is True
    assert (await task).chunks[-1]["engine_data"]["abort"]
    for fields in ({"abort_all": True, "request_id": "a"}, {"abort_all": "yes"}, {"abort_all": False}):
        status, _ = await trainer.ask("/engine/abort_request", json.dumps(fields).encode())
        assert status == 400
