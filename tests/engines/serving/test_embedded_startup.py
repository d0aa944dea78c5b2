"""Everything that can be wrong with a checkpoint or a setting stops the start with one clear
line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_doubles import collect
from safetensors.torch import load_file, save_file

from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, native
from worker.engines.embedded.config import resolve_dtype
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model.kernels import choose_kernels
from worker.errors import StartupError
from worker.sampling import SamplingParams

MALFORMED = ("", "cpu:", "cuda:", "cuda:01", "cuda:-1", "cuda:1:2", "cuda:\u0661", "CUDA", " cuda", "cuda\t")
"""Devices that torch does not know by these names."""


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "model"))


async def complaint(path: Path, **changes: Any) -> str:
    engine = EmbeddedEngine(EmbeddedConfig(model_path=path, **({"device": "cpu"} | changes)))
    with pytest.raises(StartupError) as caught:
        await engine.start()
    await engine.stop()
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(path: Path, **changes: object) -> None:
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | changes))


def drop_a_weight(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def let_weights_overflow(path: Path) -> None:
    """Together: each is finite."""
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    weights["lm_head.weight"].fill_(1e10)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def cut_the_weights(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, "no such directory"),
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: is not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "JSON object"),
        (lambda path: edit_config(path, model_type="mamba"), "config.json: model_type 'mamba' is not served"),
        (lambda path: edit_config(path, model_type=None), "config.json: model_type None is not known"),
        (
            lambda path: edit_config(path, quantization_config={"quant_method": "bitsandbytes"}),
            "config.json: quantization_config.quant_method 'bitsandbytes' is not served",
        ),
        (
            lambda path: edit_config(path, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "config.json: rope_scaling: rope type 'dynamic'",
        ),
        (lambda path: edit_config(path, hidden_size=32), "model"),
        (lambda path: (path / "model.safetensors").unlink(), "no safetensors weights"),
        (cut_the_weights, "model.safetensors: is cut off: tensor "),
        (let_weights_overflow, "its first forward pass in float32 gives logits that are infinite or not a number"),
        (drop_a_weight, "model.safetensors: weights are incomplete, tensor model.norm.weight of shape [64] is missing"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ],
)
async def test_spoilt_checkpoints(checkpoint: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(checkpoint)
    message = await complaint(checkpoint)
    assert message.startswith("--model-path")
    assert said in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_length": 4096}, "--context-length 4096 is above the model's own limit of 2048"),
        ({"context_length": 1}, "--context-length must be at least 2"),
        ({"max_num_seqs": "x"}, "--max-num-seqs must be an integer, got 'x'"),
        ({"max_num_seqs": True}, "--max-num-seqs must be an integer, got True"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1"),
        ({"max_queue": -1}, "--max-queue must be at least 0"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "--max-num-batched-tokens 8 is below --max-num-seqs 9"),
        ({"step_timeout_s": 0.0}, "--step-timeout-s must be above 0"),
        ({"max_mixed_chunk": 0}, "--max-mixed-chunk must be at least 1"),
        ({"kv_block_size": 0}, "--kv-block-size must be at least 1"),
        ({"kv_blocks": 127}, "--kv-blocks 127 cannot hold one context of 2048 tokens, which takes 128"),
        ({"kv_blocks": 128, "kv_cache_memory": 2**20}, "--kv-blocks and --kv-cache-memory both size the KV cache"),
        (
            {"kv_cache_memory": 2**19},
            "--kv-cache-memory 0.5 MiB cannot hold one context of 2048 tokens, which takes 1.0 MiB",
        ),
        ({"kv_blocks": 10**9}, "--kv-blocks 1000000000: 7629.4 GiB of KV cache, "),
        ({"kv_cache_memory": 2**43}, "--kv-cache-memory: 8192.0 GiB of KV cache, "),
        ({"local_workers": 0}, "--local-workers must be at least 1"),
        ({"dtype": "float16"}, "--dtype must be auto, float32, bfloat16, got 'float16'"),
        ({"dtype": "int8"}, "--dtype must be auto, float32"),
        ({"device": "tpu"}, "--device must be"),
        ({"device": "cpu:1"}, "--device must be"),
        *[({"device": device}, f"--device must be auto, cpu, cuda or cuda:N, got {device!r}") for device in MALFORMED],
        ({"device": "cuda:99"}, "--device cuda:99: torch sees"),
    ],
)
async def test_settings(checkpoints: dict[str, Path], changes: dict[str, Any], said: str) -> None:
    assert (await complaint(checkpoints["llama"], **changes)).startswith(said)


@pytest.mark.parametrize(
    "field",
    [field for field in fields(EmbeddedConfig) if field.name != "speculative_config"],  # read by its own class
    ids=lambda field: field.name,
)
@pytest.mark.parametrize("value", [object(), 1.5j, {"a": 1}, [3]], ids=lambda value: type(value).__name__)
def test_a_setting_of_another_type_is_named(field: Field[Any], value: object) -> None:
    config = EmbeddedConfig(**({"model_path": "unused"} | {field.name: value}))  # type: ignore[arg-type]
    flag = {"role": "--disaggregation-mode"}.get(field.name, f"--{field.name.replace('_', '-')}")
    with pytest.raises(StartupError, match=f"^{flag} must be "):
        config.check()


async def test_a_context_that_does_not_fit_into_memory(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_budget, "free_memory", lambda device: 1_000_000)
    assert "lower it" in await complaint(checkpoints["llama"])


async def test_the_store_is_as_large_as_memory_allows(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, width, float32, tokens
    monkeypatch.setattr(kv_budget, "free_memory", lambda device: 600 * block)
    engine = EmbeddedEngine(EmbeddedConfig(model_path=checkpoints["llama"], device="cpu"))
    info = await engine.start()
    await engine.stop()
    assert info.total_kv_blocks == 144  # 9 whole pages of the 150 blocks that a quarter holds


async def test_a_fresh_checkpoint(checkpoints: dict[str, Path], device: str) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(model_path=checkpoints["llama"], device=device, max_num_seqs=2))
    info = await engine.start()
    await engine.stop()
    assert (info.context_length, info.vocab_size, info.eos_token_ids) == (2048, 1024, (4, 1))
    assert info.total_kv_blocks == 2 * 128


@pytest.mark.parametrize("arch", ["llama", "mistral"])
async def test_bfloat16(checkpoints: dict[str, Path], arch: str, device: str) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(model_path=checkpoints[arch], device=device, dtype="bfloat16"))
    await engine.start()
    try:
        params = SamplingParams(max_tokens=70, ignore_eos=True, logprobs=0)
        tokens, last = await collect(engine, "one", [5] * 50, params)
    finally:
        await engine.stop()
    assert (len(tokens), last.finish_reason) == (70, "length")
    assert max(tokens) < 1000


@pytest.mark.parametrize(
    ("checkpoint_dtype", "computed"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
def test_automatic_dtypes(checkpoint_dtype: torch.dtype, computed: torch.dtype) -> None:
    assert resolve_dtype("auto", checkpoint_dtype) is computed


async def test_without_a_tokenizer_all_ids_may_be_sampled(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    engine = EmbeddedEngine(EmbeddedConfig(model_path=checkpoint, device="cpu"))
    info = await engine.start()
    try:
        bias = torch.zeros(info.vocab_size)
        bias[1010] = 1000.0
        tokens, _ = await collect(engine, "one", [5], SamplingParams(max_tokens=3, embedding_bias=bias))
    finally:
        await engine.stop()
    assert tokens == [1010] * 3


def test_kernels_that_were_not_built_are_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "they were not built: the package was installed where there was no C compiler"
    monkeypatch.setattr(native, "unavailable", lambda dtype, path=None: problem)
    chosen = choose_kernels("auto", torch.device("cpu"), torch.float32)
    assert chosen.name == "torch"
    assert [record.message for record in caplog.records] == [
        f"torch's kernels compute, which are slower, and not the native ones: {problem}"
    ]
