"""DeepSeek's GGUF files, newer and older ones, are the checkpoints that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_twists import TwistedSource, write_checkpoint
from safetensors.torch import load_file
from test_gguf_twists import compare, converted

from worker.errors import StartupError
from worker.models.gguf_file import Metadata
from worker.models.gguf_latent import DEEPSEEK_2, DEEPSEEK_3
from worker.tiny_model import write_tiny_model

KINDS = ("deepseek_v2", "deepseek_v3")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Random checkpoints, and their networks."""
    root = tmp_path_factory.mktemp("deepseek")
    tiny = write_tiny_model(root / "tiny")
    return {kind: (root / kind, write_checkpoint(root / kind, kind, tiny)) for kind in KINDS}


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_its_files(kind: str, is_older: bool, sources: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    checkpoint, network = sources[kind]
    (tmp_path / "source").symlink_to(checkpoint)
    source = TwistedSource(checkpoint)
    names = {name.removeprefix("blk.1.") for name in source.tensors}
    assert {"attn_k_b.weight", "attn_v_b.weight", "ffn_gate_shexp.weight"} < names
    assert ("exp_probs_b.bias" in names) == (kind == "deepseek_v3")
    if is_older:
        source.as_older_file()
        assert "blk.1.attn_kv_b.weight" in source.tensors
    compare(kind, network, converted(source, tmp_path))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.BF16])
def test_blocks_of_transposed_keys(kind: Any, sources: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Blocks lie along the rows of the file, which are columns of the checkpoint."""
    source = TwistedSource(sources["deepseek_v3"][0])
    keys, values = (source.tensors[f"blk.2.attn_{part}_b.weight"][0] for part in "kv")
    wide = torch.randn(*keys.shape[:2], 32, generator=torch.Generator().manual_seed(3)).numpy()
    source.metadata["deepseek2.attention.key_length_mla"] += 32 - keys.shape[2]
    rows = source.config["num_attention_heads"] * (32 + source.config["qk_rope_head_dim"])
    for layer in range(source.config["num_hidden_layers"]):
        source.tensors[f"blk.{layer}.attn_k_b.weight"] = wide, kind
        queries, stored = source.tensors[f"blk.{layer}.attn_q_b.weight"]
        source.tensors[f"blk.{layer}.attn_q_b.weight"] = queries[:1].repeat(rows, 0), stored
    found = load_file(converted(source, tmp_path) / "model.safetensors")["model.layers.2.self_attn.kv_b_proj.weight"]
    rounded = torch.from_numpy(dequantize(quantize(wide, kind), kind).reshape(wide.shape))
    assert torch.equal(found, torch.cat((rounded.mT, torch.from_numpy(values)), 1).flatten(0, 1))


def test_groups_that_published_files_do_not_tell(sources: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    def routing(layout: Any, layers: int, experts: int, **keys: int) -> tuple[int, int]:
        counts = {"expert_count": experts, "expert_used_count": 6, **keys}
        metadata = Metadata({f"deepseek2.{key}": value for key, value in counts.items()})
        found = layout._routing(metadata, "deepseek2", layers)
        return found["n_group"], found["topk_group"]

    assert routing(DEEPSEEK_2, 60, 160) == (8, 3)
    assert routing(DEEPSEEK_3, 61, 256) == (8, 4)
    assert routing(DEEPSEEK_2, 27, 64) == routing(DEEPSEEK_3, 61, 384) == (1, 1)
    assert routing(DEEPSEEK_3, 61, 256, expert_group_count=1, expert_group_used_count=1) == (1, 1)
    source = TwistedSource(sources["deepseek_v2"][0])
    for key in ("expert_group_count", "expert_group_used_count"):
        del source.metadata[f"deepseek2.{key}"]
    config = json.loads((converted(source, tmp_path) / "config.json").read_text())
    assert (config["topk_method"], config["n_group"]) == ("greedy", 1)


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("deepseek_v2", "expert_weights_norm", True, "expert_weights_norm is not supported without deepseek2.expert_g"),
        ("deepseek_v2", "expert_gating_func", 3, "deepseek2.expert_gating_func must be an integer of at least 1"),
        ("deepseek_v2", "rope.scaling.yarn_log_multiplier", None, "it lacks deepseek2.rope.scaling.yarn_log_multip"),
        ("deepseek_v2", "expert_gating_func", 2, "it lacks tensor blk.1.exp_probs_b.bias"),
        ("deepseek_v3", "expert_gating_func", 1, "expert_weights_norm is not supported without deepseek2.expert_g"),
        ("deepseek_v3", "expert_group_count", 3, "deepseek2.expert_group_count 3 and deepseek2.expert_group_used_co"),
        ("deepseek_v3", "expert_group_count", 8, "deepseek2.expert_group_count 8 and deepseek2.expert_group_used_co"),
        ("deepseek_v3", "attention.key_length_mla", 8, "key_length_mla must be above deepseek2.rope.dimension_count"),
        ("deepseek_v3", "attention.kv_lora_rank", 12, "attn_kv_a_mqa.weight must be of shape [20, 64]"),
        ("deepseek_v3", "attention.q_lora_rank", None, "it lacks tensor blk.0.attn_q.weight"),
        ("deepseek_v3", "attention.value_length_mla", 8, "must be of shape"),
        ("deepseek_v3", "rope.dimension_count", 7, "must be even"),
        ("deepseek_v3", "leading_dense_block_count", 2, "it lacks tensor blk.1.ffn_gate.weight"),
        ("deepseek_v3", "nextn_predict_layers", 1, "deepseek2.nextn_predict_layers is not supported"),
        ("deepseek_v3", "expert_shared_count", 0, "deepseek2.expert_shared_count must be an integer of at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, key: str, value: Any, said: str, sources: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    source = TwistedSource(sources[kind][0])
    source.metadata[f"deepseek2.{key}"] = value
    if value is None:
        del source.metadata[f"deepseek2.{key}"]
    with pytest.raises(StartupError) as refused:
        converted(source, tmp_path)
    assert said in str(refused.value)
