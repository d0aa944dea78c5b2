"""A GGUF file is served as its source is: weights, logits, tokens, tokenizer, template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import F32, Source
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from worker.engines.embedded import Engine
from worker.models import convert_gguf
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

KINDS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.Q8_0: torch.bfloat16,
    GGMLQuantizationType.Q4_0: torch.bfloat16,
    GGMLQuantizationType.Q4_1: torch.bfloat16,
    GGMLQuantizationType.Q5_0: torch.bfloat16,
}
"""Types of matrices, and the dtype of theirs in the checkpoint; that of vectors is float32."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PROMPT = [5, 300, 17, 600, 42, 7]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {arch: write_tiny_model(root / arch, arch=arch) for arch in ARCHITECTURES}


def converted(source: Source, directory: Path) -> Path:
    path = source.write(directory / "model.gguf")
    return convert_gguf(path, directory / "cache", lambda line: None)


def logits(network: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = network.float()(torch.tensor([PROMPT])).logits[0]
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_are_those_of_the_source(
    checkpoints: dict[str, Path], tmp_path: Path, arch: str, kind: GGMLQuantizationType
) -> None:
    source = Source(checkpoints[arch], kind)
    found = load_file(converted(source, tmp_path) / "model.safetensors")
    assert found.keys() == source.weights.keys()
    for name, value in source.weights.items():
        if value.ndim > 1:
            stored = torch.from_numpy(np.array(dequantize(quantize(value, kind), kind).reshape(value.shape)))
            stored = stored.to(KINDS[kind])
        else:
            stored = torch.from_numpy(value)
        assert found[name].dtype == stored.dtype, name
        assert torch.equal(found[name], stored), name


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_reads_the_same(
    checkpoints: dict[str, Path], tmp_path: Path, arch: str, kind: GGMLQuantizationType
) -> None:
    """Its own reader of GGUF files is another implementation of names, order of rows and blocks."""
    checkpoint = converted(Source(checkpoints[arch], kind), tmp_path)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    theirs = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=network)
    ours = load_file(checkpoint / "model.safetensors")
    assert theirs["tensors"].keys() == ours.keys()
    for name, value in theirs["tensors"].items():
        assert torch.equal(ours[name], value.to(KINDS[kind] if value.dim() > 1 else torch.float32)), name
    settings = json.loads((checkpoint / "config.json").read_text())
    known = {key: value for key, value in theirs["config"].items() if key in settings}
    assert len(known) > 10
    assert {key: settings[key] for key in known if key != "eos_token_id"} == pytest.approx(
        {key: value for key, value in known.items() if key != "eos_token_id"}
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_offline_engine_answers_alike_from_file_and_source(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = Source(checkpoints[arch], F32).write(tmp_path / "model.gguf")
    params = SamplingParams(max_tokens=24)
    answers = []
    for path in (checkpoints[arch], file):
        engine = Engine(path, device="cpu", dtype="float32", max_num_seqs=2, context_length=128)
        (result,) = engine.generate(["Once upon a time"], params, progress=False)
        answers.append((result.token_ids, result.text, result.finish_reason, engine.info.eos_token_ids))
    assert answers[0][:3] == answers[1][:3]
    assert set(answers[0][3]) == set(answers[1][3])


def test_ids_without_a_token_stay_without_one(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = converted(Source(checkpoints["llama"]), tmp_path)
    ours = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    assert ours == AutoTokenizer.from_pretrained(checkpoints["llama"]).get_vocab()


def test_template_and_special_tokens(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source, checkpoint = checkpoints["qwen3"], converted(Source(checkpoints["qwen3"]), tmp_path)
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (checkpoint, source))
    messages = [{"role": "user", "content": "Hello"}]
    rendered = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (theirs.bos_token, theirs.eos_token, theirs.pad_token)
    special = json.loads((checkpoint / "generation_config.json").read_text())
    assert set(special["eos_token_id"]) == {theirs.eos_token_id, theirs.convert_tokens_to_ids("<|endoftext|>")}


def test_experts_are_taken_apart(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Qwen3's mixture of experts, whose experts lie in one tensor for each matrix."""
    random = tmp_path / "random"
    shutil.copytree(checkpoints["qwen3"], random)
    settings = json.loads((random / "config.json").read_text())
    mixture = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = AutoConfig.for_model(**{**settings, **mixture, "model_type": "qwen3_moe"})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(random)
    source = Source(random)
    prefix, experts = "qwen3moe", 5
    source.metadata = {key.replace("qwen3_moe.", f"{prefix}."): value for key, value in source.metadata.items()}
    source.metadata |= {
        f"{prefix}.expert_count": experts,
        f"{prefix}.expert_used_count": 2,
        f"{prefix}.expert_feed_forward_length": 32,
    }
    kept = {name: value for name, value in source.tensors.items() if ".experts." not in name}
    for layer in range(source.config["num_hidden_layers"]):
        kept[f"blk.{layer}.ffn_gate_inp.weight"] = kept.pop(f"blk.{layer}.mlp.gate.weight")
        for part in ("gate", "up", "down"):
            stacked = [
                source.weights[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]
                for expert in range(experts)
            ]
            kept[f"blk.{layer}.ffn_{part}_exps.weight"] = (np.stack(stacked), F32)
    source.tensors = kept
    path = source.write(tmp_path / "model.gguf", prefix)
    checkpoint = convert_gguf(path, tmp_path / "cache", lambda line: None)
    found = load_file(checkpoint / "model.safetensors")
    assert found.keys() == source.weights.keys()
    assert all(torch.equal(found[name], torch.from_numpy(value)) for name, value in source.weights.items())
    networks = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (random, checkpoint)]
    assert torch.equal(logits(networks[0]), logits(networks[1]))


def test_llama_3_scales_its_frequencies(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The file has factors; the configuration that they come from is recovered."""
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    long = tmp_path / "long"
    shutil.copytree(checkpoints["llama"], long)
    config = json.loads((long / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 500_000.0, "rope_scaling": scaling, "max_position_embeddings": 131_072}
    (long / "config.json").write_text(json.dumps(config))
    source = Source(long)
    network = AutoModelForCausalLM.from_pretrained(long, dtype=torch.float32)
    plain = 1 / 500_000.0 ** (np.arange(0, 16, 2) / 16)
    factors = plain / network.model.rotary_emb.inv_freq.numpy()
    source.tensors["rope_freqs.weight"] = (factors.astype(np.float32), F32)
    checkpoint = converted(source, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(again), logits(network))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    source = Source(checkpoints["qwen2"])
    source.metadata |= {
        "qwen2.rope.scaling.type": kind,
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 512,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
    }
    network = AutoModelForCausalLM.from_pretrained(converted(source, tmp_path), dtype=torch.float32)
    rope = network.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 4.0, 10_000.0)
    assert rope.get("original_max_position_embeddings") == (512 if kind == "yarn" else None)
    assert rope.get("beta_fast") == (16.0 if kind == "yarn" else None)


@pytest.mark.parametrize(("factor", "scaling"), [(4.0, {"rope_type": "linear", "factor": 4.0}), (0.0, None)])
def test_a_factor_alone_is_linear(
    checkpoints: dict[str, Path], tmp_path: Path, factor: float, scaling: dict[str, object] | None
) -> None:
    """As in llama.cpp, to which a factor of 0 is none."""
    source = Source(checkpoints["qwen2"])
    source.metadata["qwen2.rope.scaling.factor"] = factor
    config = json.loads((converted(source, tmp_path) / "config.json").read_text())
    assert config["rope_scaling"] == scaling


def test_a_tensor_that_is_dequantised_in_parts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = Source(checkpoints["llama"])
    weights = load_file(checkpoints["llama"] / "model.safetensors")
    assert weights["model.embed_tokens.weight"].numel() > 60_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.models.gguf_file.CHUNK_VALUES", 1000)
        found = load_file(converted(source, tmp_path) / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("keeps_blocks", [False, True])
def test_numbers_of_another_width_beside_them_keep_their_values(
    checkpoints: dict[str, Path], tmp_path: Path, kind: GGMLQuantizationType, keeps_blocks: bool
) -> None:
    """float16 has no 100,000, bfloat16 no 1.001."""
    source = Source(checkpoints["llama"], kind)
    norm = np.linspace(0.5, 1e5, 64, dtype=np.float32)
    norm[0] = 1.001
    source.tensors["blk.0.ffn_norm.weight"] = norm, F32
    file = source.write(tmp_path / "model.gguf")
    checkpoint = convert_gguf(file, tmp_path / "cache", lambda line: None, keeps_blocks)
    found = load_file(checkpoint / "model.safetensors")["model.layers.0.post_attention_layernorm.weight"]
    assert torch.equal(found, torch.from_numpy(norm))
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["torch_dtype"] == ("bfloat16" if kind == GGMLQuantizationType.Q8_0 else "float32")
    (result,) = Engine(checkpoint, device="cpu").generate([PROMPT], SamplingParams(max_tokens=2), progress=False)
    assert result.finish_reason == "length"


def test_a_file_of_float16_alone_stays_so(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The norms, float32 in every file, are numbers of float16 too."""
    checkpoint = converted(Source(checkpoints["llama"], GGMLQuantizationType.F16), tmp_path)
    assert json.loads((checkpoint / "config.json").read_text())["torch_dtype"] == "float16"
    both = Source(checkpoints["llama"], GGMLQuantizationType.F16)
    name = "blk.0.ffn_down.weight"
    both.tensors[name] = both.tensors[name][0], GGMLQuantizationType.BF16
    (tmp_path / "both").mkdir()
    checkpoint = converted(both, tmp_path / "both")
    assert json.loads((checkpoint / "config.json").read_text())["torch_dtype"] == "float32"


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    from worker.models.numbers import encoded

    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).numpy()
    values[:4] = [1.00390625, 1.01171875, 0.0, -1.00390625]  # two ties, down and up
    assert (
        encoded(values, "bfloat16").tobytes()
        == torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    )
