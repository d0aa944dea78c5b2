"""Checkpoints that other programs quantised: served as their formats define them, or refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import decoder_shapes
import pytest
import random_checkpoints
import torch
from effort import grid
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from model_runs import last_logits, load_native
from safetensors.torch import load_file, save_file
from third_party_checkpoints import FORMATS, GPTQ, compressed, save, write

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model import HfModel, decoder_layers
from worker.engines.embedded.model.linear import linears
from worker.engines.embedded.model.quantisation import QuantisedGemm, StackedExperts
from worker.engines.embedded.model.updates import updates_of
from worker.engines.embedded.offline import Engine
from worker.engines.weights import WeightsRefused
from worker.errors import StartupError
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.native]


load = partial(load_native, dtype="float32")


def num_packed(model: HfModel) -> int:
    return sum(isinstance(layer.gemm, QuantisedGemm) for layer in linears(model._network))


@pytest.mark.parametrize("format", grid(FORMATS, fast=4))
def test_a_llama_is_what_its_format_means(format: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Bit by bit: the float32 kernels on the weights that the definition gives."""
    path = write(checkpoints["llama"], tmp_path / "it", format, files=2)
    model = load(path)
    found = last_logits(model)
    assert torch.equal(found, last_logits(load(path / "dense")))
    assert bool(num_packed(model)) == FORMATS[format][2]
    assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], found)
    assert torch.equal(last_logits(load(path)), found)  # from the packed copy, if there is one
    dequantised = load(path, quantization="none")
    assert not num_packed(dequantised)
    assert torch.equal(last_logits(dequantised), found)


@pytest.mark.parametrize(
    ("kind", "format", "packed"),
    [
        ("granite", "gptq", 15),  # five of each layer, of which QKV is fused, and not the head
        ("gpt_oss", "mxfp4", 45),  # of three layers five experts' three
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("phi3", "packed", 9),
                ("gemma2", "awq", 15),
                ("olmo2", "int_quantized", 15),
                ("qwen3_moe", "gptq", 6),
                ("qwen3_moe", "fp8", 0),
                ("deepseek_v3", "fp8", 0),
                ("deepseek_v3", "gptq_order", 6),
                ("mixtral", "awq", 6),
                ("glm4_moe", "packed_8", 21),
            )
        ),
    ],
)
def test_any_decoder_is_what_its_format_means(kind: str, format: str, packed: int, tmp_path: Path) -> None:
    """Linear layers keep their weights; experts, and what transformers fuses, are dequantised."""
    if kind in random_checkpoints.TYPES:
        random_checkpoints.write(tmp_path / kind, kind, random_checkpoints.TYPES[kind])
    else:
        decoder_shapes.write(tmp_path / kind, kind, 0)
    path = write(tmp_path / kind, tmp_path / "it", format, files=2)
    model = load(path)
    found = last_logits(model)
    assert num_packed(model) == packed
    assert torch.equal(found, last_logits(load(path / "dense")))
    assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], found)


def test_experts_stay_packed_in_transformers_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder_shapes.write(tmp_path / "gpt_oss", "gpt_oss", 0)
    path = write(tmp_path / "gpt_oss", tmp_path / "it", "mxfp4")
    monkeypatch.delitem(decoder_layers.TWISTS, "gpt_oss")
    model = load(path)
    assert num_packed(model) == 3 * 5 * 2  # gate and up are one
    assert torch.equal(last_logits(model), last_logits(load(path / "dense")))
    assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], last_logits(model))


@pytest.mark.parametrize("rounding", ["none", "int8"])
def test_an_update_of_mxfp4_experts_stays_packed(rounding: str, tmp_path: Path) -> None:
    """Numbers that MXFP4 holds give the bits of a start from them; others are rounded as llama.cpp
    rounds them, and a second update is as the first.
    """
    paths = []
    for which in range(2):
        decoder_shapes.write(tmp_path / f"plain-{which}", "gpt_oss", 0)
        if which:
            tensors = load_file(tmp_path / "plain-1" / "model.safetensors")
            changed = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
            save_file(changed, tmp_path / "plain-1" / "model.safetensors", {"format": "pt"})
        paths.append(write(tmp_path / f"plain-{which}", tmp_path / f"it-{which}", "mxfp4"))
    model, fresh = (load(path, activation_dtype=rounding) for path in paths)
    updates = updates_of(EmbeddedConfig(model_path=paths[0], device="cpu", activation_dtype=rounding), model)
    given = updates.check(load_file(paths[1] / "dense" / "model.safetensors"))
    experts = {name for name in given.weights if name.endswith(("gate_up_proj", "down_proj"))}
    assert given.formats == dict.fromkeys(experts, "MXFP4")
    assert len(experts) == 2 * 3
    expected = last_logits(fresh)
    for _ in range(2):
        model.replace_network(updates.network(given))
        assert num_packed(model) == 45
        assert torch.equal(last_logits(model), expected)
    name = next(iter(experts))
    plain = load_file(tmp_path / "plain-1" / "model.safetensors")
    rounded = updates.check(plain).weights[name]
    assert isinstance(rounded, StackedExperts)
    rows = plain[name].mT.contiguous().numpy()
    theirs = dequantize(quantize(rows, Kind.MXFP4), Kind.MXFP4).reshape(rows.shape)
    assert torch.equal(rounded.dequantised().mT, torch.from_numpy(theirs))
    with pytest.raises(WeightsRefused, match=f"tensor {name}: holds a number that is infinite or not a number"):
        updates.check(plain | {name: torch.full_like(plain[name], float("nan"))})


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("llama", "gptq"),
        ("gpt_oss", "mxfp4"),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in (("llama", "gptq_order"), ("llama", "fp8"), ("granite", "awq"))
        ),
    ],
)
def test_how_it_ran_changes_no_bit(
    kind: str, format: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, in chunks, preempted, from the prefix cache; in bfloat16, too."""
    monkeypatch.setattr(kv_budget, "PAGE_TOKENS", 32)
    if kind in ("granite", "gpt_oss"):
        decoder_shapes.write(tmp_path / "plain", kind, 0)
    path = write(checkpoints.get(kind, tmp_path / "plain"), tmp_path / "it", format)
    prompts = [[(7 * which + 3 * at) % 290 + 3 for at in range(length)] for which, length in enumerate((1, 5, 33, 61))]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=3)

    def run(**changes: Any) -> list[Any]:
        engine = Engine(model_path=path, device="cpu", numerics="exact", **changes)
        results = [*engine.generate(prompts, params), *engine.generate(prompts, params)]
        assert results[0].token_ids == results[4].token_ids
        return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in results]

    for dtype in ("float32", "bfloat16"):
        alone = run(dtype=dtype, max_num_seqs=1)
        assert len(set(alone[3][0])) > 3
        assert run(dtype=dtype, max_num_seqs=4, max_num_batched_tokens=7) == alone
        assert run(dtype=dtype, max_num_seqs=4, max_num_batched_tokens=48, context_length=96, kv_blocks=6) == alone


class TestLog:
    """What is not done as the checkpoint's own runtime does it is said."""

    def lines(self, caplog: pytest.LogCaptureFixture, path: Path, **settings: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            load(path, **settings)
        return caplog.text

    def test_dequantised(self, checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        source = checkpoints["llama"]
        found = self.lines(caplog, write(source, tmp_path / "a", "gptq_order"))
        assert "14 of 14 weights in GPTQ int4 are dequantised: columns of a group are not side by side" in found
        found = self.lines(caplog, write(source, tmp_path / "b", "fp8"))
        assert "weights in FP8 are dequantised: no kernels read them" in found
        assert "weights in FP8: activations are not rounded to FP8" in found
        assert "FP8 weights" not in load(tmp_path / "b").made_by
        found = self.lines(caplog, write(source, tmp_path / "c", "awq"), kernels="torch", numerics="fast")
        assert "weights in AWQ int4 are dequantised: torch kernels do not read them" in found

    def test_scales_that_are_not_used(
        self, checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(checkpoints["llama"], tmp_path / "it", "int_quantized")
        expected = last_logits(load(path))
        tensors = load_file(path / "model.safetensors")
        for name in ("k_scale", "v_scale", "q_proj.input_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
        save(tensors, path)
        edit(path, kv_cache_scheme={"num_bits": 8, "type": "float"})
        settings = json.loads((path / "config.json").read_text())
        settings["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
        (path / "config.json").write_text(json.dumps(settings))
        found = self.lines(caplog, path)
        assert "activations are not rounded to int8" in found
        assert "scales of the KV cache are not used: it is in --kv-cache-dtype" in found
        assert "scales of the KV cache are not used: 2 tensors, as model.layers.0.self_attn.k_scale" in found
        assert "scales of activations are not used: 1 tensors" in found
        assert torch.equal(last_logits(load(path)), expected)


def edit(path: Path, **changes: Any) -> None:
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = settings.get("quantization_config", {}) | changes
    (path / "config.json").write_text(json.dumps(settings))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save(tensors, path)


UP = "model.layers.1.mlp.up_proj"


def test_modules_that_are_not_converted(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A layer with its own bits, one that is not quantised, and one projection of a fused one."""
    path = write(checkpoints["llama"], tmp_path / "it", "gptq")
    dense, in_8 = load_file(path / "dense" / "model.safetensors"), write(checkpoints["llama"], tmp_path / "8", "gptq_8")
    others, theirs = load_file(in_8 / "model.safetensors"), load_file(in_8 / "dense" / "model.safetensors")
    plain = (UP, "model.layers.0.self_attn.k_proj")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in plain:
            for end in (".qweight", ".qzeros", ".scales", ".g_idx"):
                del tensors[name + end]
            tensors[f"{name}.weight"] = dense[f"{name}.weight"]
        for name, tensor in others.items():
            if "0.mlp" in name:
                tensors[name] = tensor

    edit_tensors(path, change)
    edit(
        path,
        dynamic={r"-:.*1\.mlp\.up_proj": {}, r"+:.*\.0\.mlp": {"bits": 8}},
        modules_to_not_convert=["model.layers.0.self_attn.k_proj"],
    )
    save(dense | {name: each for name, each in theirs.items() if "0.mlp" in name}, path / "dense")
    assert torch.equal(last_logits(load(path)), last_logits(load(path / "dense")))
    edit(path, dynamic=None)
    with pytest.raises(StartupError, match=r"mlp\.\w+\.scales must be of shape"):
        load(path)


def test_biases_of_zeros_are_left_out(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write(checkpoints["llama"], tmp_path / "it", "gptq")
    expected = last_logits(load(path))
    edit_tensors(path, lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(128)}))
    assert torch.equal(last_logits(load(path)), expected)
    edit_tensors(path, lambda tensors: tensors[f"{UP}.bias"].add_(1))
    with pytest.raises(StartupError, match=rf"weight {UP}.bias of shape \[128\] has no place in the model"):
        load(path)


FP8_ROWS = compressed("float-quantized", num_bits=8, type="float", strategy="channel")


@pytest.mark.parametrize(
    ("format", "changes", "said"),
    [
        (
            "gptq",
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not served; gptq, awq, .* Serve the",
        ),
        ("gptq", {"quant_method": "hqq"}, "quant_method 'hqq' is not served"),
        ("gptq", {"quant_method": ["gptq"]}, r"quant_method \['gptq'\] is not served"),
        ("gptq", {"bits": 3}, "quantization_config.bits must be 4 or 8, got 3"),
        ("gptq", {"bits": 8}, "down_proj.scales must be of shape"),
        (
            "gptq",
            {"group_size": 64},
            r"scales must be of shape \[2, 64\], as config.json has it, got \[4, 64\]",
        ),
        ("gptq", {"group_size": 0}, "group_size must be -1 or above 0, got 0"),
        ("gptq", {"group_size": "32"}, "group_size must be a valid integer, got '32'"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format must be False"),
        ("gptq", {"dynamic": {"+:(": {"bits": 8}}}, r"dynamic: '\(' is no pattern"),
        (
            "gptq",
            {"modules_to_not_convert": ["mlp.up_proj"]},
            "up_proj.qweight: .* says that .*up_proj is not quantised",
        ),
        ("awq", {"version": "gemv"}, "version must be 'gemm' or 'GEMM', got 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point must be True, got False"),
        ("awq", {"quant_method": "gptq"}, "scales must be of shape"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size list should have at least 2 items"),
        ("fp8", {"weight_block_size": [32, 32]}, "weight_scale_inv must be of shape"),
        ("fp8", {"fmt": "e5m2"}, "fmt must be 'e4m3', got 'e5m2'"),
        ("fp8", FP8_ROWS, "weight_scale_inv must be of shape"),
        ("packed", {"format": "marlin-24"}, "format must be one of pack-quantized, .*, got 'marlin-24'"),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format must be dense"),
        ("packed", {"transform_config": {"config_groups": {"u": {}}}}, "transformed weights are not served"),
        ("packed", {"ignore": ["re:.*up_proj"]}, "up_proj is not quantised"),
        ("packed", {"ignore": ["re:("]}, r"ignore: '\(' is no pattern"),
        ("packed", {"config_groups": {}}, "config_groups must name weights that are quantised"),
        (
            "packed",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "zeta": 1}}}},
            "config_groups.g.weights.zeta",
        ),
    ],
)
def test_configurations_that_are_refused(
    format: str, changes: dict[str, Any], said: str, written: dict[str, Path], tmp_path: Path
) -> None:
    path = shutil.copytree(written[format], tmp_path / "it")
    edit(path, **changes)
    with pytest.raises(StartupError, match=said) as caught:
        load(path)
    assert str(caught.value).startswith(f"--model-path {path}: ")


@pytest.fixture(scope="module")
def written(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("third_party")
    formats = ("gptq", "awq", "packed", "packed_8", "int_quantized", "fp8", "gptq_order")
    return {format: write(checkpoints["llama"], root / format, format) for format in formats}


@pytest.mark.parametrize(
    ("format", "name", "change", "said"),
    [
        ("gptq", ".qzeros", None, "tensor {0}.qweight: tensor {0}.qzeros is missing beside it"),
        ("gptq", ".qweight", None, "tensor {0}.(qzeros|scales|g_idx) belongs to no quantised weight"),
        ("gptq", ".qweight", torch.zeros(8, 8), "tensor {0}.qweight must be {0}.qweight of type I32"),
        ("gptq", ".qweight", torch.zeros(8, dtype=torch.int32), "qweight must have 2 dimensions"),
        ("gptq", ".qweight", torch.zeros(8, 64, dtype=torch.int32), "scales must be of shape"),
        ("gptq", ".scales", torch.full((2, 128), torch.inf).half(), "{0}.qweight: a scale or weight is infinite"),
        ("gptq", ".scales", torch.ones(2, 128, dtype=torch.int32), "scales must be of type F16 or BF16 or F32"),
        ("gptq", ".weight", torch.ones(128, 64), "{0}.weight is there, not quantised, too"),
        ("gptq_order", ".g_idx", torch.full((64,), 2, dtype=torch.int32), "groups of columns must be from 0 to 1"),
        ("gptq_order", ".g_idx", torch.full((64,), -1, dtype=torch.int32), "groups of columns must be from 0 to 1"),
        ("awq", ".qzeros", torch.zeros(1, 16, dtype=torch.int32), "qzeros must be of shape"),
        ("packed", ".weight_shape", torch.tensor([128, 63]), r"weight_shape must be \[128, 64\], got \[128, 63\]"),
        ("packed_8", ".weight_zero_point", None, "{0}.weight_zero_point is missing beside it"),
        ("packed", ".weight_packed", None, "belongs to no quantised weight"),
        ("int_quantized", ".weight_scale", None, "{0}.weight_scale is missing beside it"),
        ("int_quantized", ".weight", torch.zeros(128, 64), "{0}.weight_scale belongs to no quantised weight"),
        ("fp8", ".weight", torch.zeros(128, 64).to(torch.float8_e5m2), "belongs to no quantised weight"),
        ("fp8", ".weight", torch.full((128, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn), "infinite, not a"),
        ("fp8", ".unknown", torch.zeros(3, dtype=torch.int8), "{0}.unknown of type I8 has no place"),
    ],
)
def test_tensors_that_are_refused(
    format: str, name: str, change: torch.Tensor | None, said: str, written: dict[str, Path], tmp_path: Path
) -> None:
    path = shutil.copytree(written[format], tmp_path / "it")
    if change is None:
        edit_tensors(path, lambda tensors: tensors.pop(UP + name))
    else:
        edit_tensors(path, lambda tensors: tensors.update({UP + name: change}))
    with pytest.raises(StartupError, match=said.format(UP)) as caught:
        load(path)
    assert str(caught.value).startswith(f"--model-path {path}: ")


def test_a_configuration_alone_quantises_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(checkpoints["llama"], tmp_path / "it")
    edit(path, **GPTQ)
    with pytest.raises(StartupError, match="quantization_config: no weight is stored in GPTQ int4"):
        load(path)


def test_rounding_once_more(written: dict[str, Path], tmp_path: Path) -> None:
    """What is kept is not rounded again; what no kernel reads may be."""
    with pytest.raises(StartupError, match=r"--quantization int8: .* is quantised already \(GPTQ int4\)"):
        load(written["gptq"], quantization="int8")
    model = load(written["fp8"], quantization="int8")
    assert num_packed(model)
    assert torch.equal(last_logits(model), last_logits(load(written["fp8"] / "dense", quantization="int8")))
    with pytest.raises(StartupError, match="--activation-dtype int8 needs quantised weights"):
        load(written["fp8"], activation_dtype="int8")
    truth, found = (last_logits(load(written["gptq"], activation_dtype=each)) for each in ("none", "int8"))
    assert 0 < (found - truth).norm() / truth.norm() < 0.3


def test_weights_of_gpt2_lie_transposed(tmp_path: Path) -> None:
    decoder_shapes.write(tmp_path / "gpt2", "gpt2", 0)
    path = write(tmp_path / "gpt2", tmp_path / "it", "gptq")
    with pytest.raises(StartupError, match="weights of gpt2 lie transposed"):
        load(path)
