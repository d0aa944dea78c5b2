"""The routes of --engine-port, over HTTP: keys, updates of all kinds, refusals, pauses, sleep."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from dynamo.llm import exceptions
from engine_port_client import BYTES_OPTIONS, KEY, LONG, Generated, Trainer, tensors_of, trained
from safetensors.torch import save, save_file

from adapters.client import processor, selection
from worker.__main__ import main
from worker.requests.continuation import COMPUTED_WITH
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed) for seed in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    async with trained(models[0], tmp_path_factory.mktemp("keys") / "keys.txt") as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def first_weights(trainer: Trainer, models: list[Path]) -> AsyncIterator[None]:
    """Every test begins with the weights of the first model."""
    yield
    assert (await trainer.tell("get_weight_version"))["state"] == "serving"
    await trainer.tell("update_weights_from_disk", model_path=str(models[0]))


@pytest.mark.parametrize("key", [None, "", "the trainer", KEY + "2", "# of tests"])
async def test_without_a_key_nothing_is_told(trainer: Trainer, key: str | None) -> None:
    for path in ("/engine/get_weight_version", "/engine/no_such", "/"):
        status, answer = await trainer.ask(path, key=key)
        assert (status, answer["status"]) == (401, "error")


async def test_paths_and_methods(trainer: Trainer) -> None:
    assert (await trainer.ask("/engine/get_weight_version", method="GET", key="another"))[0] == 200
    for method in ("GET", "PUT", "DELETE"):
        status, answer = await trainer.ask("/engine/pause", method=method)
        assert (status, answer["message"]) == (405, "/engine/pause must be asked by POST")
    status, answer = await trainer.ask("/engine/set_weights")
    assert status == 404
    assert "update_weights_from_disk" in answer["message"]


async def test_tensors_are_those_of_the_checkpoint(trainer: Trainer, models: list[Path]) -> None:
    told = (await trainer.tell("weights"))["tensors"]
    shapes = {name: list(tensor.shape) for name, tensor in tensors_of(models[0]).items()}
    assert {name: kind["shape"] for name, kind in told.items()} == shapes
    assert {kind["dtype"] for kind in told.values()} == {"F32"}


def pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), 100_000):
        yield content[start : start + 100_000]


async def update(trainer: Trainer, how: str, source: Path, tmp_path: Path) -> dict[str, Any]:
    content = save(tensors_of(source))
    if how == "directory":
        return await trainer.tell("update_weights_from_disk", model_path=str(source), weight_version="new")
    if how == "file":
        path = tmp_path / "step-7.safetensors"
        path.write_bytes(content)
        return await trainer.tell("update_weights_from_disk", model_path=str(path), weight_version="new")
    if how == "shared memory":
        shared = SharedMemory(create=True, size=len(content))
        try:
            assert shared.buf is not None
            shared.buf[: len(content)] = content
            name, size = shared.name, len(content)
            return await trainer.tell("update_weights", shared_memory=name, size=size, weight_version="new")
        finally:
            shared.close()
            shared.unlink()
    body = pieces(content) if how == "chunks" else content
    status, answer = await trainer.ask("/engine/update_weights?weight_version=new", body, **BYTES_OPTIONS)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("how", ["directory", "file", "body", "chunks", "shared memory"])
async def test_an_update(trainer: Trainer, models: list[Path], tmp_path: Path, how: str) -> None:
    before, first = await trainer.tell("get_weight_version"), await trainer.generate(20)
    answer = await update(trainer, how, models[1], tmp_path)
    assert answer["number"] == before["number"] + 1
    assert (answer["version"], answer["version_declared"], answer["num_tensors"]) == ("new", True, 21)
    assert answer["digest"] != before["digest"]
    told = {"num_tensors": 21, "seconds": answer["seconds"], "formats": {}}
    assert await trainer.tell("get_weight_version") | told == answer
    second = await trainer.generate(20)
    assert second.token_ids != first.token_ids
    assert second.versions == [{"version": "new", "from_token": 0}]
    primes = {"engine_rpc": "update_weights_from_path", "weight_version": "prime-rl's"}
    await trainer.tell("pause_generation", mode="keep", clear_cache=True)
    await trainer.tell("update_weights_from_disk", model_path=str(models[0]), **primes)
    await trainer.tell("resume_generation")
    assert (await trainer.generate(20)).token_ids == first.token_ids


@pytest.mark.native  # torch's take an update of all tensors alone
async def test_a_version_that_is_named_like_its_number_is_declared(trainer: Trainer) -> None:
    number = (await trainer.tell("get_weight_version"))["number"]
    for query, expected in (({"weight_version": str(number + 1)}, True), ({}, False)):
        _, told = await trainer.give({NORM: torch.ones(64)}, **query)
        assert told["version_declared"] is expected
    assert told["version"] == str(number + 2)


@pytest.mark.native  # torch's take an update of all tensors alone
async def test_equal_weights_have_equal_digests(trainer: Trainer, models: list[Path]) -> None:
    tensors = tensors_of(models[1])
    names = sorted(tensors)
    _, whole = await trainer.give(tensors)
    await trainer.tell("update_weights_from_disk", model_path=str(models[0]))
    for part in (names[:3], names[3:]):
        _, last = await trainer.give({name: tensors[name] for name in part})
    assert whole["digest"] == last["digest"]


async def test_requests_in_flight_name_the_token(trainer: Trainer, models: list[Path]) -> None:
    old = (await trainer.tell("get_weight_version"))["version"]
    growing = Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.give(tensors_of(models[1]), weight_version="mid")
    answer = await task
    assert [entry["version"] for entry in answer.versions] == [old, "mid"]
    changed = answer.versions[1]["from_token"]
    assert 5 <= changed < LONG
    named = [chunk["engine_data"]["weight_versions"] for chunk in answer.chunks if "engine_data" in chunk]
    assert named[0] == [{"version": old, "from_token": 0}]  # a client that streams is told at once


OF_TWO_VERSIONS = {
    "nothing": [],
    "phrase_ban": [processor("phrase_ban", phrases=["on", "e", "th", "a"])],
    "mirostat": [processor("mirostat", tau=2.5)],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OF_TWO_VERSIONS)
async def test_an_answer_of_two_versions_goes_on(trainer: Trainer, models: list[Path], name: str, seed: int) -> None:
    """From the first token of the newer one on it is what these weights alone say; unless a state
    is made of logits, which nobody has any more.
    """
    chosen = "logits_processors:" + selection(*OF_TWO_VERSIONS[name])
    asked: dict[str, Any] = {"seed": seed, "annotations": [COMPUTED_WITH, chosen]}
    info, growing = trainer.worker.server.info, Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing, **asked))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.give(tensors_of(models[1]))
    whole = await task
    cut = whole.versions[1]["from_token"]
    digests = next(chunk for chunk in reversed(whole.chunks) if chunk["token_ids"])["engine_data"][COMPUTED_WITH]
    so_far = {"generated_tokens": cut, "numerics": info.made_by, "kv_dtype": info.kv_dtype, **digests}
    goes_on = trainer.generate(LONG, behind=whole.token_ids[:cut], continues=so_far, **asked)
    if name == "mirostat":
        with pytest.raises(exceptions.InvalidArgument, match=r"continues\.weights: must be '.*', this worker's, got"):
            await goes_on
    else:
        assert whole.token_ids[:cut] + (await goes_on).token_ids == whole.token_ids


REFUSED = [
    ("update_weights_from_disk", {}, "model_path: must be a text"),
    ("update_weights_from_disk", {"model_path": "/no/such"}, "model_path: there is no"),
    ("update_weights_from_disk", {"model_path": "/", "path": 1}, "'path': unknown field"),
    ("update_weights_from_disk", {"model_path": "/", "mode": "now"}, "mode: must be abort, finish, keep"),
    ("update_weights_from_disk", {"model_path": "/", "weight_version": ""}, "weight_version: must be a text"),
    ("update_weights_from_disk", {"model_path": "/", "engine_rpc": "init"}, "engine_rpc: must be reload_weights"),
    ("update_weights_from_disk", {"model_path": "/proc"}, "it has no safetensors weights"),
    ("update_weights", {"shared_memory": "../etc/passwd", "size": 8}, "shared_memory: must be the name"),
    ("update_weights", {"shared_memory": "no_such_memory", "size": 8}, "cannot be read: No such file"),
    ("update_weights", {"shared_memory": "x", "size": 0}, "size: must be an integer from 1"),
    ("pause", {"mode": 3}, "mode: must be"),
    ("pause", {"clear_cache": "yes"}, "clear_cache: must be true or false"),
    ("sleep", {"level": 3}, "level: must be an integer from 1 to 2"),
    ("resume", {"mode": "keep"}, "'mode': unknown field"),
    ("abort_request", {}, "request_id: must be a text"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
async def test_fields_are_checked(trainer: Trainer, name: str, fields: dict[str, Any], message: str) -> None:
    status, answer = await trainer.ask(f"/engine/{name}", json.dumps(fields).encode())
    assert status == 400
    assert message in answer["message"]


async def test_a_field_is_given_once(trainer: Trainer) -> None:
    for path in ("pause?mode=keep", "update_weights?weight_version=7&mode=keep"):
        status, answer = await trainer.ask(f"/engine/{path}", b'{"mode": "abort"}')
        assert (status, answer["message"]) == (400, "mode: is in the query and in the body")
    assert (await trainer.tell("get_weight_version"))["state"] == "serving"


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "shape": ({NORM: torch.ones(3)}, f"tensor {NORM}: must be of shape [64], as the model's is, got [3]"),
    "name": ({"norm": torch.ones(64)}, "tensor 'norm': the model has none of this name"),
    "nan": ({NORM: torch.full((64,), float("nan"))}, f"tensor {NORM}: holds a number that is infinite"),
    "infinite": ({NORM: torch.full((64,), -float("inf"))}, f"tensor {NORM}: holds a number that is infinite"),
    "large": ({NORM: torch.full((64,), 1e300, dtype=torch.float64)}, "holds 1e+300, which float32 cannot"),
    "type": ({NORM: torch.ones(64, dtype=torch.int32)}, f"tensor {NORM} must be of type F32, F16, BF16, F64, got I32"),
    "bytes": ({NORM: torch.ones(64, dtype=torch.int8)}, f"tensor {NORM} must be of type F32, F16, BF16, F64, got I8"),
    "none": ({}, "the update has no tensors"),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_tensors_are_checked(trainer: Trainer, kind: str) -> None:
    tensors, message = WRONG[kind]
    before, answer = await trainer.tell("get_weight_version"), await trainer.generate(12)
    status, told = await trainer.give(tensors)
    assert status == 400
    assert message in told["message"]
    assert await trainer.tell("get_weight_version") == before
    assert (await trainer.generate(12)).token_ids == answer.token_ids


async def test_bodies_are_checked(trainer: Trainer, tmp_path: Path) -> None:
    content = save({NORM: torch.ones(64)})
    for body, message in (
        (content[:-1], "is cut off: tensor model.norm.weight lies beyond its end"),
        (b"\xff" * 80, "no safetensors file"),
        (b"", "no safetensors file"),
    ):
        status, answer = await trainer.ask("/engine/update_weights", body, **BYTES_OPTIONS)
        assert status == 400
        assert message in answer["message"]
    status, answer = await trainer.ask("/engine/update_weights", bytes(10**8), **BYTES_OPTIONS)
    assert status == 413
    status, answer = await trainer.ask("/engine/pause", b"[1]")
    assert (status, "must be a JSON object" in answer["message"]) == (400, True)
    save_file({NORM: torch.ones(64)}, tmp_path / "one.safetensors")
    save_file({NORM: torch.ones(64)}, tmp_path / "two.safetensors")
    status, answer = await trainer.ask(
        "/engine/update_weights_from_disk", json.dumps({"model_path": str(tmp_path)}).encode()
    )
    assert (status, "is in another file, too" in answer["message"]) == (400, True)


SENDER = textwrap.dedent(
    """
    import socket, sys
    content = open(sys.argv[2], "rb").read()
    head = "POST /engine/update_weights HTTP/1.1\\r\\nHost: a\\r\\nContent-Type: application/octet-stream\\r\\n"
    head += f"Authorization: Bearer {sys.argv[3]}\\r\\n" + sys.argv[4].format(len(content)) + "\\r\\n\\r\\n"
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall(head.encode())
    part = content[: len(content) // 2]
    if "chunked" in head:
        connection.sendall(f"{len(part):x}\\r\\n".encode() + part + b"\\r\\n")
    else:
        connection.sendall(part)
    print("half", flush=True)
    sys.stdin.read()
    """
)


@pytest.mark.parametrize("framing", ["Content-Length: {}", "Transfer-Encoding: chunked"])
async def test_a_sender_that_is_killed_changes_nothing(trainer: Trainer, models: list[Path], framing: str) -> None:
    before, answer = await trainer.tell("get_weight_version"), await trainer.generate(12)
    counts = trainer.worker.server.engine_port.routes.counts  # type: ignore[union-attr]
    interrupted, path = counts["interrupted"], models[1] / "model.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(trainer.port), str(path), KEY, framing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as sender:
        assert sender.stdout is not None
        assert await asyncio.to_thread(sender.stdout.readline) == b"half\n"
        os.kill(sender.pid, signal.SIGKILL)
    for _ in range(500):
        if counts["interrupted"] > interrupted:
            break
        await asyncio.sleep(0.01)
    assert counts["interrupted"] == interrupted + 1
    assert await trainer.tell("get_weight_version") == before
    assert (await trainer.generate(12)).token_ids == answer.token_ids
    status, _ = await trainer.give(tensors_of(models[1]))
    assert status == 200


async def test_a_pause_keeps_and_holds(trainer: Trainer) -> None:
    growing = Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    assert (await trainer.tell("pause_generation", mode="keep"))["state"] == "paused"
    await asyncio.sleep(0.05)
    later = asyncio.create_task(trainer.generate(5))
    have = len(growing.token_ids)
    await asyncio.sleep(0.1)
    assert len(growing.token_ids) == have < LONG
    assert not later.done()
    assert (await trainer.tell("resume_generation"))["state"] == "serving"
    assert len((await task).token_ids) == LONG
    assert len((await later).token_ids) == 5


async def test_what_a_pause_has_kept_finishes_in_the_next(trainer: Trainer) -> None:
    """So no answer mixes two versions: what came meanwhile waits for the new ones."""
    growing = Generated()
    task = asyncio.create_task(trainer.generate(LONG, growing))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.tell("pause", mode="keep")
    later = asyncio.create_task(trainer.generate(5))
    while trainer.worker.server.engine.num_unfinished() < 2:
        await asyncio.sleep(0.001)
    assert (await trainer.tell("pause", mode="finish"))["state"] == "paused"
    assert len((await task).token_ids) == LONG
    await asyncio.sleep(0.05)
    assert not later.done()
    await trainer.tell("resume")
    assert len((await later).token_ids) == 5


@pytest.mark.parametrize("mode", ["abort", "finish", "keep"])
async def test_the_mode_of_an_update_in_a_pause(trainer: Trainer, models: list[Path], mode: str) -> None:
    """It is of what the pause has kept."""
    growing, wants = Generated(), dict[str, Any](annotations=["return_token_ids"])
    task = asyncio.create_task(trainer.generate(LONG, growing, **wants))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    await trainer.tell("pause", mode="keep")
    told = await trainer.tell("update_weights_from_disk", model_path=str(models[1]), mode=mode)
    assert told["state"] == "paused"
    if mode != "keep":
        await asyncio.wait_for(asyncio.shield(task), 10)
    await trainer.tell("resume")
    answer = await task
    assert answer.chunks[-1].get("engine_data", {}).get("abort", False) == (mode == "abort")
    assert (len(answer.token_ids) == LONG) == (mode != "abort")
    assert len(answer.versions) == (2 if mode == "keep" else 1)


async def test_a_pause_lets_requests_finish(trainer: Trainer, models: list[Path]) -> None:
    growing = Generated()
    task = asyncio.create_task(trainer.generate(300, growing))
    while len(growing.token_ids) < 5:
        await asyncio.sleep(0.001)
    updating = asyncio.create_task(trainer.give(tensors_of(models[1]), mode="finish", weight_version="after"))
    await asyncio.sleep(0.03)
    later = asyncio.create_task(trainer.generate(20))
    status, told = await updating
    assert (status, told["state"]) == (200, "serving")
    assert task.done()
    assert len((await task).versions) == 1
    assert [entry["version"] for entry in (await later).versions] in (["after"], [(await task).versions[0]["version"]])


async def test_sleep_and_wake(trainer: Trainer, models: list[Path]) -> None:
    answer = await trainer.generate(12)
    assert (await trainer.tell("sleep", level=2))["state"] == "asleep"
    for name in ("resume", "sleep", "update_weights_from_disk"):
        fields = {"model_path": str(models[1])} if name.startswith("update") else {}
        status, told = await trainer.ask(f"/engine/{name}", json.dumps(fields).encode())
        assert (status, told["status"]) == (409, "error")
    assert (await trainer.tell("wake_up"))["state"] == "needs_weights"
    status, told = await trainer.give({NORM: torch.ones(64)})
    assert (status, "must have every tensor" in told["message"]) == (400, True)
    await trainer.tell("update_weights_from_disk", model_path=str(models[0]))
    assert (await trainer.generate(12)).token_ids == answer.token_ids
    assert (await trainer.ask("/engine/wake"))[0] == 409


async def test_metrics_and_the_receipt_name_the_version(
    trainer: Trainer, models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = trainer.worker.server.metrics.registry
    done = registry.get_sample_value("dlw_weight_updates_total", {"outcome": "done"})
    _, told = await trainer.give(tensors_of(models[1]), weight_version="named")
    assert registry.get_sample_value("dlw_weight_version") == told["number"]
    assert registry.get_sample_value("dlw_weight_updates_total", {"outcome": "done"}) == done + 1  # type: ignore[operator]
    annotation = 'logits_processors:{"version": 1, "receipt": true, "processors": []}'
    raw = {"token_ids": [20, 21, 22], "annotations": [annotation], "stop_conditions": {"max_tokens": 3}}
    from engine_port_client import Context

    chunks = [chunk async for chunk in trainer.worker.generate(raw, Context("with a receipt"))]
    receipt = chunks[-1]["engine_data"]["logits_processors"]
    assert receipt["weights"] == [{"version": "named", "from_token": 0, "digest": told["digest"]}]
    await check_replay(receipt, raw["token_ids"], models, tmp_path, capsys)


async def check_replay(
    receipt: dict[str, Any], prompt: object, models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A receipt of updated weights is replayed with their checkpoint, and with no other one."""
    digest = receipt["weights"][0]["digest"]
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    other = {"version": "later", "from_token": 2, "digest": "00"}
    for model, changes, status, said in (
        (models[1], {}, 0, "equal to those recorded"),
        (models[0], {}, 2, f"weights[0].digest: the answer is of updated weights, version named with {digest}"),
        (models[1], {"weights": [*receipt["weights"], other]}, 2, "weights: the answer is of several versions"),
    ):
        (tmp_path / "receipt.json").write_text(json.dumps(receipt | changes))
        fixed = ["--prompt-file", str(tmp_path / "prompt.json"), "--model-path", str(model), "--device", "cpu"]
        argv = ["replay", str(tmp_path / "receipt.json"), *fixed, "--packed-copy", "off"]
        assert await asyncio.to_thread(main, argv) == status
        assert said in "".join(capsys.readouterr())
