"""What an update asks of vLLM, and in which order; tests/vllm has the answers of real weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save
from system_faults import full_disk

from worker.engines.request_table import RequestTable
from worker.engines.vllm import VllmConfig
from worker.engines.vllm import weights as vllm_weights
from worker.engines.vllm.requests import RunningRequest
from worker.engines.vllm.weights import VllmWeights
from worker.engines.weights import PauseMode, WeightsRefused, WrongState
from worker.errors import EngineBroken
from worker.tiny_model import write_tiny_model


class Llm:
    """Records what it is asked; loading fails where `is_bad`, and requests may hold KV."""

    def __init__(self, is_tied: bool = False) -> None:
        model = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(tie_word_embeddings=is_tied))
        self.vllm_config = SimpleNamespace(model_config=model)
        self.asked: list[str] = []
        self.is_bad = self.holds_kv = False
        self.loaded: dict[str, torch.Tensor] = {}

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        self.asked.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.asked.append("resume")

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[None]:
        self.asked.append(method)
        if self.is_bad:
            raise RuntimeError("a rank has no memory")
        self.loaded = load_file(args[0])
        return [None]

    async def reset_encoder_cache(self) -> None:
        self.asked.append("reset encoder")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        assert reset_connector  # else offloaded KV stays
        self.asked.append(f"reset {reset_running_requests}")
        return reset_running_requests or not self.holds_kv


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


UPDATE = ["load_weights_from", "reset True", "reset encoder"]
ORDERS: list[tuple[PauseMode, list[str]]] = [
    ("keep", ["pause keep", *UPDATE, "resume"]),
    ("finish", ["pause wait", *UPDATE, "resume"]),
    ("abort", ["pause abort", *UPDATE, "resume"]),
]


async def test_a_pause_with_abort_ends_one_that_waits(model: Path) -> None:
    """It does not wait for the answers that the other lets finish, as on the embedded engine."""
    drained = asyncio.Event()

    class Busy(Llm):
        async def pause_generation(self, mode: str, clear_cache: bool) -> None:
            await super().pause_generation(mode, clear_cache)
            if mode == "wait":
                await drained.wait()

    llm, running, table = Busy(), RunningRequest("r"), RequestTable[RunningRequest]()
    table.add(running)
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), table, "base", lambda reason: None)
    finishing = asyncio.create_task(weights.pause("finish"))
    await asyncio.sleep(0)
    with pytest.raises(WrongState):
        await weights.pause("keep")
    aborting = asyncio.create_task(weights.pause("abort"))
    await asyncio.sleep(0)
    assert running.done
    drained.set()
    await asyncio.gather(finishing, aborting)
    assert (llm.asked, weights.weights_state) == (["pause wait", "pause abort"], "paused")


@pytest.mark.parametrize("updates", [False, True], ids=["a pause", "an update"])
async def test_what_vllm_has_queued_finishes_too(model: Path, updates: bool) -> None:
    """vLLM's own pause leaves it in the queue, where preemption puts answers that have begun."""

    llm, running, table = Llm(), RunningRequest("r"), RequestTable[RunningRequest]()
    answered = asyncio.Event()

    async def answer() -> None:
        await answered.wait()

    running.task = asyncio.create_task(answer())
    table.add(running)
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), table, "base", lambda reason: None)
    change = weights.update_weights(model, None, "finish") if updates else weights.pause("finish")
    changing, other = asyncio.create_task(change), RunningRequest("other")
    while not weights._finishing:
        await asyncio.sleep(0.001)
    assert not weights.is_busy  # a silence of vLLM is noticed
    await weights.admit(running)
    admitting = asyncio.create_task(weights.admit(other))
    await asyncio.sleep(0.01)
    assert (llm.asked, admitting.done()) == ([], False)
    answered.set()
    await asyncio.gather(changing, admitting)
    assert llm.asked == (["pause wait", *UPDATE, "resume"] if updates else ["pause wait"])
    await weights.admit(other)


@pytest.mark.parametrize(("mode", "asked"), ORDERS)
async def test_an_update_of_vllm(model: Path, mode: PauseMode, asked: list[str]) -> None:
    llm, broken = Llm(), list[str]()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", broken.append)
    tensors = load_file(model / "model.safetensors")
    with pytest.raises(WeightsRefused, match="must have every tensor"):
        await weights.update_weights(memoryview(save({"model.norm.weight": torch.ones(64)})), None, mode)
    assert (llm.asked, weights.weight_version.digest) == ([], "base")
    first = await weights.update_weights(model, "one", mode)
    assert (llm.asked, weights.weights_state, first.version.name) == (asked, "serving", "one")
    assert all(torch.equal(llm.loaded[name], tensor) for name, tensor in tensors.items())
    again = await weights.update_weights(memoryview(save(tensors)), None, mode)
    assert (again.version.number, again.version.digest) == (2, first.version.digest)


async def test_tied_embeddings_are_one_weight(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tied", arch="qwen3")
    llm, tensors = Llm(is_tied=True), load_file(model / "model.safetensors")
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    head = tensors["model.embed_tokens.weight"]
    with pytest.raises(WeightsRefused, match="the model's embeddings are tied"):
        await weights.update_weights(memoryview(save({**tensors, "lm_head.weight": head + 1})), None, "keep")
    assert (llm.asked, weights.weight_version.number) == ([], 0)
    await weights.update_weights(memoryview(save({**tensors, "lm_head.weight": head.clone()})), None, "keep")
    assert weights.weight_version.number == 1


async def test_an_untied_head_must_be_given(model: Path) -> None:
    llm, tensors = Llm(), load_file(model / "model.safetensors")
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    del tensors["lm_head.weight"]
    with pytest.raises(WeightsRefused, match=r"tensor lm_head\.weight: is missing"):
        await weights.update_weights(memoryview(save(tensors)), None, "keep")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
async def test_codes_of_a_quantised_weight_are_no_weight(model: Path, dtype: torch.dtype) -> None:
    weights = VllmWeights(Llm(), VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    name, tensors = "model.norm.weight", load_file(model / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(WeightsRefused, match=f"tensor {name}: must be of type F32, BF16, F16, F64, got {dtype}"):
        await weights.update_weights(memoryview(save(tensors)), None, "keep")


async def test_scales_in_one_of_several_files_are_no_weight(model: Path, tmp_path: Path) -> None:
    """Of a type that the safetensors library has no word for."""
    source = in_two_files(model, tmp_path / "parts")
    file = source / "scales.safetensors"
    header = b'{"scales":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["scales"] = file.name
    index.write_text(json.dumps(content))
    weights = VllmWeights(Llm(), VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    with pytest.raises(WeightsRefused, match="tensor scales: must be of type F32, BF16, F16, F64, got F8_E8M0"):
        await weights.update_weights(source, None, "keep")


async def test_a_number_without_a_dimension_is_a_tensor(model: Path) -> None:
    tensors = {**load_file(model / "model.safetensors"), "model.layers.0.mlp.act_fn.beta": torch.tensor(0.5)}
    (model / "model.safetensors").write_bytes(save(tensors))
    weights = VllmWeights(Llm(), VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    assert (await weights.update_weights(model, None, "keep")).num_tensors == len(tensors)


async def test_what_a_pause_has_kept_finishes_in_the_next(model: Path) -> None:
    llm = Llm()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    modes: list[PauseMode] = ["keep", "keep", "finish"]
    for mode in modes:
        await weights.pause(mode)
    assert (llm.asked, weights.weights_state) == (["pause keep", "resume", "pause wait"], "paused")


ORDERS_IN_A_PAUSE: list[tuple[PauseMode, list[str]]] = [
    ("keep", UPDATE),
    ("finish", ["resume", "pause wait", *UPDATE]),
    ("abort", ["pause abort", *UPDATE]),
]


@pytest.mark.parametrize(("mode", "asked"), ORDERS_IN_A_PAUSE)
async def test_the_mode_of_an_update_in_a_pause(model: Path, mode: PauseMode, asked: list[str]) -> None:
    llm, running, table = Llm(), RunningRequest("r"), RequestTable[RunningRequest]()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), table, "base", list[str]().append)
    await weights.pause("keep")
    table.add(running)
    await weights.update_weights(model, None, mode)
    assert llm.asked == ["pause keep", *asked]
    assert (running.done, weights.weights_state) == (mode == "abort", "paused")


async def test_an_update_that_fails_half_way_breaks_the_engine(model: Path) -> None:
    llm, broken = Llm(), list[str]()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", broken.append)
    llm.is_bad = True
    with pytest.raises(EngineBroken, match="a rank has no memory"):
        await weights.update_weights(model, None, "keep")
    assert broken == ["an update of vLLM's weights failed: a rank has no memory"]
    assert weights.weight_version.number == 0
    assert llm.asked == ["pause keep", "load_weights_from"]  # nothing is computed with what is half loaded


async def test_nobody_waits_for_an_engine_that_has_died(model: Path) -> None:
    """vLLM itself lets a call wait for ever whose engine dies before the answer."""

    class Hangs(Llm):
        async def pause_generation(self, mode: str, clear_cache: bool) -> None:
            await asyncio.Event().wait()

    weights = VllmWeights(Hangs(), VllmConfig(model_path=str(model)), RequestTable(), "base", lambda reason: None)
    pausing = asyncio.create_task(weights.pause("finish"))
    await asyncio.sleep(0.01)
    weights.fail(EngineBroken("its process is gone"))
    with pytest.raises(EngineBroken, match="its process is gone"):
        await asyncio.wait_for(pausing, 5)
    assert weights.weights_state == "serving"
    with pytest.raises(EngineBroken, match="its process is gone"):
        await weights.resume()


def in_two_files(model: Path, directory: Path) -> Path:
    """The weights of a checkpoint as large ones have them."""
    tensors = sorted(load_file(model / "model.safetensors").items())
    directory.mkdir()
    files = {"one.safetensors": dict(tensors[::2]), "two.safetensors": dict(tensors[1::2])}
    for file, some in files.items():
        (directory / file).write_bytes(save(some))
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


async def test_weights_without_room_are_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose /dev/shm has 64 MB; the next update is taken once there is room."""
    monkeypatch.setattr(vllm_weights, "_SHARED_MEMORY", shared := tmp_path / "shm")
    shared.mkdir()
    llm = Llm()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", lambda reason: None)
    content = (model / "model.safetensors").read_bytes()
    for source in (memoryview(content), model, in_two_files(model, tmp_path / "parts")):
        refusal = rf"^the weights cannot be copied to {shared}: .* --shm-size$"
        with full_disk(4096), pytest.raises(WeightsRefused, match=refusal):
            await weights.update_weights(source, None, "keep")
        assert (llm.asked, list(shared.iterdir())) == ([], [])
    shared.rmdir()
    shared.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(WeightsRefused, match=r"cannot be copied to .*none: No such file or directory$"):
        await weights.update_weights(memoryview(content), None, "keep")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert (await weights.update_weights(memoryview(content), None, "keep")).version.number == 1


@pytest.mark.parametrize("is_one", [True, False], ids=["one file", "two files"])
async def test_files_that_are_cut_off_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one: bool
) -> None:
    """A trainer writes its next checkpoint: of what was mapped the worker would die."""
    source = model if is_one else in_two_files(model, tmp_path / "parts")
    files = list(source.glob("*.safetensors"))
    for file in files:
        os.utime(file, (1, 1))
    copy = shutil.copyfile if is_one else safetensors.torch.save_file

    def cutting(*given: Any) -> None:
        if is_one:
            copy(*given)
        for file in files:
            os.truncate(file, 4096)
        if not is_one:
            copy(*given)

    monkeypatch.setattr(*(shutil, "copyfile", cutting) if is_one else (safetensors.torch, "save_file", cutting))
    llm = Llm()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", lambda reason: None)
    with pytest.raises(WeightsRefused, match=r"^model_path: .*It has changed while it was read: .*\.safetensors"):
        await weights.update_weights(source, None, "keep")
    assert (llm.asked, weights.weight_version.number) == ([], 0)


HOLDS = """
import sys, time
from pathlib import Path
from worker.engines.vllm import weights

weights._SHARED_MEMORY = Path(sys.argv[1])
with weights._own_copy() as directory:
    weights._copy(memoryview(b"weights"), directory)
    print(directory, flush=True)
    time.sleep(600)
"""


def test_weights_of_a_killed_worker_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take memory for ever."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        left = Path(worker.stdout.readline().strip())
        worker.kill()
    assert list(tmp_path.iterdir()) == [left]
    monkeypatch.setattr(vllm_weights, "_SHARED_MEMORY", tmp_path)
    with vllm_weights._own_copy() as directory:
        assert list(tmp_path.iterdir()) == [directory]
    assert not list(tmp_path.iterdir())


async def test_a_cache_that_vllm_keeps_is_not_flushed(model: Path) -> None:
    llm = Llm()
    weights = VllmWeights(llm, VllmConfig(model_path=str(model)), RequestTable(), "base", list[str]().append)
    await weights.flush_cache()
    llm.holds_kv = True
    with pytest.raises(WrongState, match="keeps its prefix cache while requests hold KV"):
        await weights.flush_cache()
    await weights.update_weights(model, None, "keep")


async def test_damaged_weights_name_the_field_that_gave_them(model: Path, tmp_path: Path) -> None:
    weights = VllmWeights(Llm(), VllmConfig(model_path=str(model)), RequestTable(), "base", lambda reason: None)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"{" * 64)
    with pytest.raises(WeightsRefused, match=r"^model_path: .*header"):
        await weights.update_weights(damaged, None, "keep")
    with pytest.raises(WeightsRefused, match=r"^body: .*header"):
        await weights.update_weights(memoryview(damaged.read_bytes()), None, "keep")
