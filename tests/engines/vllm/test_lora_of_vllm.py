"""LoRA adapters: what is refused before vLLM loads them, and what it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeLlm, collect, package, running
from lora_adapters import write_adapter
from safetensors.torch import load_file, save_file

from worker.arguments import parse_arguments
from worker.engines import EngineRequest, lora_adapters
from worker.engines.lora_adapters import CONFIG, WEIGHTS, Adapter, read_adapters
from worker.engines.vllm import VllmConfig, VllmEngine, config_from
from worker.engines.vllm.settings import OWN
from worker.errors import ConfigurationError, StartupError
from worker.models.regular_files import read_regular
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_adapters_become_vllms_arguments(model: Path, tmp_path: Path) -> None:
    one, other = write_adapter(tmp_path / "one", model), write_adapter(tmp_path / "other", model, seed=1, rank=9)
    modules = ["--lora-modules", f"one={one},other={other}"]
    made = config_from(parse_arguments(["--model-path", str(model), "--engine", "vllm", *modules], {}))
    assert [(adapter.name, adapter.path, adapter.rank) for adapter in made.adapters] == [
        ("one", one, 8),
        ("other", other, 9),
    ]
    assert len({adapter.digest for adapter in made.adapters}) == 2
    known = {*package().engine_fields, "enable_lora", "max_loras", "max_lora_rank"}
    wanted = {"model": str(model), "generation_config": "vllm", "enable_lora": True, "max_loras": 2}
    found = made.engine_arguments(known, "0.0")
    assert found == {**wanted, "max_lora_rank": 16, "seed": found["seed"], **OWN}
    given = replace(made, options={"max_loras": 1})
    assert given.engine_arguments(known, "0.0")["max_loras"] == 1


def test_the_last_place_on_a_cpu_stays_empty(model: Path, tmp_path: Path) -> None:
    """vLLM's kernels there give it to requests without an adapter that are beside an adapter's."""
    one = write_adapter(tmp_path / "one", model)
    argv = ["--model-path", str(model), "--engine", "vllm", "--lora-modules", f"one={one}"]
    made = config_from(parse_arguments(argv, {}))
    known = {*package().engine_fields, "enable_lora", "max_loras", "max_lora_rank", "kv_cache_memory_bytes"}
    assert made.engine_arguments(known, "0.0", is_cpu=True)["max_loras"] == 2
    given = replace(made, options={"max_loras": 2})
    assert given.engine_arguments(known, "0.0", is_cpu=True)["max_loras"] == 2
    with pytest.raises(StartupError, match=r"^max_loras: must be at least 2 for 1 adapters, got 1: vLLM's CPU"):
        replace(made, options={"max_loras": 1}).engine_arguments(known, "0.0", is_cpu=True)
    assert "max_loras" not in VllmConfig(model_path=str(model)).engine_arguments(known, "0.0", is_cpu=True)


def configured(**config: Any) -> Callable[[Path], object]:
    def change(adapter: Path) -> None:
        known = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps(known | config))

    return change


def weighed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], object]:
    def write(adapter: Path) -> None:
        tensors = change(load_file(adapter / WEIGHTS))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(adapter / WEIGHTS))

    return write


def renamed(before: str, after: str) -> Callable[[Path], object]:
    return weighed(lambda tensors: {name.replace(before, after): tensor for name, tensor in tensors.items()})


def piped(adapter: Path) -> None:
    (adapter / CONFIG).unlink()
    os.mkfifo(adapter / CONFIG)


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda adapter: (adapter / CONFIG).unlink(), f"{CONFIG} cannot be read: No such file"),
    (piped, f"{CONFIG} cannot be read: Not a regular file"),
    (lambda adapter: (adapter / CONFIG).write_text("{"), f"{CONFIG}: "),
    (configured(peft_type="IA3"), "peft_type must be LORA, got 'IA3'"),
    (lambda adapter: (adapter / WEIGHTS).unlink(), f"must have {WEIGHTS}"),
    (lambda adapter: (adapter / WEIGHTS).write_bytes(b"torn"), f"{WEIGHTS}: is cut off"),
    (weighed(lambda tensors: {}), "its rank must be 1 to 512, got 0"),
    (configured(alpha_pattern={"q_proj": 4}), f"{CONFIG}: alpha_pattern must be empty"),
    (configured(rank_pattern={"q_proj": 8}), f"{CONFIG}: rank_pattern must be empty"),
    (
        configured(r=4),
        f"{CONFIG}: r must be the rank of base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, 8, got 4",
    ),
    (renamed("lora_A.weight", "lora_magnitude_vector"), "is no matrix of a LoRA adapter"),
    (renamed("layers.0.", "layers.99."), "another model: model.layers.99.self_attn.q_proj is no layer"),
    (
        renamed("self_attn.q_proj", "input_layernorm"),
        "layers.0.input_layernorm.lora_A.weight does not fit model.layers.",
    ),
    (
        weighed(lambda tensors: {name: t[:, :-1] if "lora_A" in name else t for name, t in tensors.items()}),
        "another model: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight does not fit",
    ),
    (
        weighed(lambda tensors: {name: t[:-1] if "lora_B" in name else t for name, t in tensors.items()}),
        "another model: base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight does not fit",
    ),
    (
        weighed(
            lambda tensors: {name: t.repeat((65, 1) if "lora_A" in name else (1, 65)) for name, t in tensors.items()}
        ),
        "got 520",
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_adapters_are_refused_by_name(model: Path, tmp_path: Path, number: int) -> None:
    change, problem = BAD[number]
    adapter = write_adapter(tmp_path / "adapter", model)
    change(adapter)
    with pytest.raises(ConfigurationError) as refused:
        read_adapters([("mine", str(adapter))], str(model))
    assert str(refused.value).startswith("--lora-modules: mine: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize("after", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_an_adapter_that_changes_while_it_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: str
) -> None:
    """A trainer writes its next one: neither matrices of two of them are an adapter, nor the
    settings of one and the matrices of another.
    """
    adapter = write_adapter(tmp_path / "adapter", model)
    for file in adapter.iterdir():
        os.utime(file, (1, 1))

    def read(path: Path) -> bytes:
        content = read_regular(path)
        if path.name == after:
            (adapter / name).write_bytes((adapter / name).read_bytes())
        return content

    monkeypatch.setattr(lora_adapters, "read_regular", read)
    with pytest.raises(ConfigurationError, match=f"^--lora-modules: mine: {name} cannot be read: It has changed"):
        read_adapters([("mine", str(adapter))], str(model))


@pytest.mark.parametrize(
    ("part", "packed"),
    [
        ("qweight", lambda weight: torch.zeros(weight.shape[1] // 8, len(weight), dtype=torch.int32)),  # GPTQ, AWQ
        ("weight_packed", lambda weight: torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32)),
        ("weight", lambda weight: torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8)),  # NVFP4
        ("weight", lambda weight: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)),  # bitsandbytes
    ],
)
def test_adapters_of_a_model_whose_weights_are_packed(
    model: Path, tmp_path: Path, part: str, packed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Its tensors have not the shapes of its layers, which other programs read."""
    adapter = write_adapter(tmp_path / "adapter", model)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        is_packed = name.endswith("_proj.weight")
        layer = name.removesuffix("weight")
        tensors[layer + part if is_packed else name] = packed(tensor) if is_packed else tensor
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    [found] = read_adapters([("mine", str(adapter))], str(tmp_path / "model"))
    assert found.layers
    renamed("layers.0.", "layers.99.")(adapter)
    with pytest.raises(ConfigurationError, match=r"another model: model\.layers\.99"):
        read_adapters([("mine", str(adapter))], str(tmp_path / "model"))


def test_command_lines_without_a_use_for_adapters(model: Path, tmp_path: Path) -> None:
    def refusal(*argv: str) -> str:
        with pytest.raises(ConfigurationError) as refused:
            config_from(parse_arguments(["--model-path", str(model), *argv], {}))
        return str(refused.value)

    assert "must be NAME=DIRECTORY entries" in refusal("--engine", "vllm", "--lora-modules", "nameless")
    assert "must be NAME=DIRECTORY entries" in refusal("--engine", "vllm", "--lora-modules", "a=/x,a=/y")
    assert "is the name of the model itself" in refusal(
        "--engine", "vllm", "--served-model-name", "m", "--lora-modules", "m=/x"
    )
    gone = refusal("--engine", "vllm", "--lora-modules", f"mine={tmp_path / 'none'}")
    assert gone == f"--lora-modules: mine: must be the directory of an adapter, got {tmp_path / 'none'}"
    with pytest.raises(ConfigurationError, match="needs a checkpoint directory"):
        read_adapters([("mine", str(tmp_path))], str(model / "config.json"))


ADAPTER = Adapter("mine", Path("/adapters/mine"), 8, "d" * 32)


async def test_a_request_gets_the_adapter_that_it_names() -> None:
    config = VllmConfig(model_path="fake", adapters=[ADAPTER])
    known = {*package().engine_fields, "enable_lora", "max_loras", "max_lora_rank"}
    async with running(config, replace(package(), engine_fields=frozenset(known))) as (engine, llm):
        assert engine._info is not None
        assert engine._info.adapters == {"mine": "d" * 32}
        for name in ("mine", None):
            await collect(engine, EngineRequest("r", [9], SamplingParams(max_tokens=1), lora_name=name))
    (loaded,) = llm.adapters
    assert (loaded.lora_name, loaded.lora_int_id, loaded.lora_path) == ("mine", 1, "/adapters/mine")
    assert [hints["lora_request"] for hints in llm.hints] == [loaded, None]


async def test_an_adapter_that_vllm_refuses_keeps_it_from_starting() -> None:
    class Refuses(FakeLlm):
        async def add_lora(self, adapter: Any) -> None:
            raise ValueError("vLLM does not yet\nsupport DoRA.")

    config = VllmConfig(model_path="fake", adapters=[ADAPTER])
    known = {*package().engine_fields, "enable_lora", "max_loras", "max_lora_rank"}
    found = replace(package(), async_llm=Refuses, engine_fields=frozenset(known))
    engine = VllmEngine(config, lambda: found)
    with pytest.raises(StartupError, match=r"--lora-modules: mine: vLLM 0\.0: vLLM does not yet support DoRA"):
        await engine.start()
    await engine.stop()
