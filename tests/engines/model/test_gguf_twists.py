"""A GGUF file of a model type with a twist is the checkpoint that it was made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_twists import ARCHITECTURES, TwistedSource, write_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import load_model
from worker.engines.embedded.model.batch_packing import Batch
from worker.errors import StartupError
from worker.models import convert_gguf, find_gguf
from worker.models.gguf_latent import DEEPSEEK_2, DEEPSEEK_3
from worker.models.gguf_layouts import LAYOUTS, MIXTRAL
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def some(cases: Iterable[object], *in_ci: object) -> list[Any]:
    """All cases, of which CI runs some."""
    return [pytest.param(each, marks=() if each in in_ci else pytest.mark.campaign) for each in cases]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


def converted(source: TwistedSource, directory: Path) -> Path:
    return convert_gguf(source.write(directory / "model.gguf"), directory / "cache", lambda line: None)


def test_every_layout_has_a_file() -> None:
    layouts = (*LAYOUTS.values(), MIXTRAL, DEEPSEEK_2, DEEPSEEK_3)
    assert set(ARCHITECTURES) == {layout.name for layout in layouts} | {"qwen3_moe"}


@pytest.mark.parametrize("kind", some(ARCHITECTURES, "gemma3_text", "mixtral", "phi3"))
def test_it_is_the_checkpoint_that_it_was_made_of(kind: str, tmp_path: Path, tiny: Path) -> None:
    network = write_checkpoint(tmp_path / "source", kind, tiny)
    compare(kind, network, converted(TwistedSource(tmp_path / "source"), tmp_path))


def compare(kind: str, network: Any, checkpoint: Path) -> None:
    """Weights, and logits by transformers and by the engine, are those of the source, `network`,
    which lies two directories above.
    """
    tmp_path = checkpoint.parents[2]
    ours, theirs = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "source"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        has_one = kind.startswith("gemma") and name.endswith("norm.weight")
        torch.testing.assert_close(ours[name], value, atol=2e-7 if has_one else 0.0, rtol=0.0)
    ids = torch.randint(300, (1, 60), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = network(ids, use_cache=False).logits[0]
        again = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(ids, use_cache=False).logits[0]
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    model = load_model(EmbeddedConfig(model_path=checkpoint, device="cpu", dtype="float32"))
    model.allocate_kv(4, 64)
    batch = Batch()
    batch.append([1], 0, ids[0].tolist(), 64)
    with torch.inference_mode():
        found = model._network.logits(model._hidden(batch, model.kv_store))
    # V2's random queries are sharp: transformers' eager and fused attention differ by 5e-4
    close = 1e-3 if kind == "deepseek_v2" else 2e-4
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_blocks_and_plain_numbers(kind: str, tmp_path: Path, tiny: Path) -> None:
    write_checkpoint(tmp_path / "source", kind, tiny)
    source = TwistedSource(tmp_path / "source", GGMLQuantizationType.BF16)
    for name, (value, stored) in source.tensors.items():
        if name.endswith("norm.weight"):  # numbers of bfloat16, to which Gemma's have added 1
            one = np.float32(kind == "gemma2")
            plain = torch.from_numpy(value - one).bfloat16().float().numpy()
            source.tensors[name] = plain + one, stored
    checkpoint = converted(source, tmp_path)
    assert json.loads((checkpoint / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found = load_file(checkpoint / "model.safetensors")
    assert torch.equal(found["model.norm.weight"].bfloat16().float(), found["model.norm.weight"])


@pytest.mark.parametrize(
    ("kind", "weight"),
    [("gpt_oss", "mlp.experts.gate_up_proj"), ("granitemoe", "block_sparse_moe.input_linear.weight")],
)
def test_a_weight_of_two_types_of_tensors(kind: str, weight: str, tmp_path: Path, tiny: Path) -> None:
    """Gates in bfloat16 and ups in float32: what holds both."""
    write_checkpoint(tmp_path / "source", kind, tiny)
    source = TwistedSource(tmp_path / "source")
    gates, _ = source.tensors["blk.1.ffn_gate_exps.weight"]
    gates = torch.from_numpy(gates).bfloat16().float().numpy()
    source.tensors["blk.1.ffn_gate_exps.weight"] = gates, GGMLQuantizationType.BF16
    found = load_file(converted(source, tmp_path) / "model.safetensors")[f"model.layers.1.{weight}"]
    ups = torch.from_numpy(source.tensors["blk.1.ffn_up_exps.weight"][0])
    both = (torch.from_numpy(gates), ups)
    assert torch.equal(found, torch.cat(both, 1) if kind == "granitemoe" else torch.stack(both, 2).flatten(1, 2).mT)


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("gemma2", "gemma2.attention.scale", 0.5, "gemma2.attention.scale is not supported"),
        ("gemma2", "gemma2.attention.sliding_window", None, "it lacks gemma2.attention.sliding_window"),
        ("granite", "granite.residual_scale", "much", "granite.residual_scale must be a number above 0"),
        ("granite", "granite.rope.scaling.finetuned", False, "granite.rope.scaling.finetuned must be true: layers"),
        ("granitemoe", "granitemoe.expert_count", 0, "tensor blk.0.ffn_gate_inp.weight must be of shape [0, 64]"),
        ("granitemoe", "granitemoe.expert_shared_feed_forward_length", 64, "_feed_forward_length is not supported"),
        ("glm4", "glm4.rope.dimension_count", 7, "glm4.rope.dimension_count must be even and at most 16"),
        ("phi3", "phi3.rope.scaling.type", "longrope", "phi3.rope.scaling.type 'longrope' is not supported"),
        ("mixtral", "llama.expert_used_count", None, "it lacks llama.expert_used_count"),
        ("mixtral", "llama.expert_count", 6, "tensor blk.0.ffn_gate_inp.weight must be of shape [6, 64]"),
        ("olmo2", "olmo2.rope.dimension_count", 8, "olmo2.rope.dimension_count other than the width of a head"),
    ],
)
def test_what_is_not_read_is_refused(kind: str, key: str, value: object, said: str, tmp_path: Path, tiny: Path) -> None:
    write_checkpoint(tmp_path / "source", kind, tiny)
    source = TwistedSource(tmp_path / "source")
    source.metadata[key] = value
    if value is None:
        del source.metadata[key]
    with pytest.raises(StartupError) as refused:
        converted(source, tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize("window", [0, 24, None])
def test_a_window_of_0_is_none(window: int | None, tmp_path: Path, tiny: Path) -> None:
    """As the files of Phi-4 have it."""
    write_checkpoint(tmp_path / "source", "phi3", tiny)
    source = TwistedSource(tmp_path / "source")
    del source.metadata["phi3.attention.sliding_window"]
    source.metadata |= {} if window is None else {"phi3.attention.sliding_window": window}
    config = json.loads((converted(source, tmp_path) / "config.json").read_text())
    assert config["sliding_window"] == (window or None)


def split(source: TwistedSource, directory: Path) -> list[Path]:
    """The file in three parts, as llama.cpp's ``gguf-split`` writes it: metadata in the first."""
    whole, tensors, paths = source.metadata, source.tensors, []
    names = list(tensors)
    for part, first in enumerate((0, len(names) // 3, 2 * len(names) // 3)):
        stop = (len(names) // 3, 2 * len(names) // 3, len(names))[part]
        source.tensors = {name: tensors[name] for name in names[first:stop]}
        source.metadata = (whole if part == 0 else {}) | {
            "split.no": part,
            "split.count": 3,
            "split.tensors.count": len(names),
        }
        paths.append(source.write(directory / f"model-{part + 1:05}-of-00003.gguf"))
    source.metadata, source.tensors = whole, tensors
    return paths


def test_a_model_in_several_files(tmp_path: Path, tiny: Path) -> None:
    write_checkpoint(tmp_path / "source", "olmo2", tiny)
    source = TwistedSource(tmp_path / "source")
    (tmp_path / "parts").mkdir()
    parts = split(source, tmp_path / "parts")
    assert find_gguf(tmp_path / "parts") == parts[0]
    one, several = (
        load_file(convert_gguf(path, tmp_path / "cache", lambda line: None) / "model.safetensors")
        for path in (source.write(tmp_path / "model.gguf"), parts[0])
    )
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)
    loud = tmp_path / "loud"
    loud.mkdir()
    for each in parts:
        (loud / each.with_suffix(".GGUF").name).write_bytes(each.read_bytes())
    assert convert_gguf(loud / "model-00001-of-00003.GGUF", tmp_path / "loud-cache", lambda line: None).is_dir()
    assert find_gguf(loud) == loud / "model-00001-of-00003.GGUF"

    def refused(path: Path) -> str:
        with pytest.raises(StartupError) as found:
            convert_gguf(path, tmp_path / "other", lambda line: None)
        return str(found.value)

    assert "split.count: name the first of its parts, model-00001-of-00003.gguf" in refused(parts[1])
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    assert "model-00003-of-00003.gguf: split.no: it must be part 2 of 3" in refused(parts[0])
    parts[2].write_bytes(third[: len(third) - 40])
    assert "model-00003-of-00003.gguf: it is cut off" in refused(parts[0])
    parts[2].unlink()
    assert "one of 3 parts, and model-00003-of-00003.gguf is not beside it" in refused(parts[0])
    assert "its name must end with -00001-of-00003.gguf" in refused(parts[0].rename(tmp_path / "renamed.gguf"))
