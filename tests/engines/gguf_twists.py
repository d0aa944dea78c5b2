"""GGUF files of random checkpoints of model types with a twist: gguf-py's names of tensors, and
what llama.cpp's converter does to their values and metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import decoder_shapes
import gguf
import numpy as np
import random_checkpoints
from gguf.constants import MODEL_ARCH_NAMES, ExpertGatingFuncType
from gguf_files import F32, Source, permuted, tokenizer_metadata

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
"""The file's architecture, by model type."""

_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 10000.0}
_STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **_YARN}
_CHANGED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "rope_parameters": _STRETCHED | {"truncate": True, "mscale": 0.707, "mscale_all_dim": 0.707},
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "moe_intermediate_size": 64,
    },
    "deepseek_v3": {
        "routed_scaling_factor": 2.446,
        "topk_group": 2,
        "n_group": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
    },
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 7, "rope_parameters": None},
    "gpt_oss": {"rope_parameters": _STRETCHED},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"moe_intermediate_size": 64, "norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "use_sliding_window": False},
}
"""Settings that a file can tell: llama.cpp knows some by the architecture alone."""

_PAIRING_ROWS = ("llama", "granite", "granitemoe", "smollm3")
_WITH_WINDOWS = ("gemma2", "gemma3", "gpt-oss", "phi3")
_EXPERT = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write_checkpoint(path: Path, kind: str, tiny: Path) -> Any:
    """The network of a random checkpoint with the tokenizer of the tiny model."""
    settings = decoder_shapes.settings(kind, 0) | _CHANGED.get(kind, {}) | random_checkpoints.ids_of(tiny)
    for key in ("layer_types", *(name for name, value in settings.items() if value is None)):
        settings.pop(key, None)
    network = random_checkpoints.write(path, kind, settings, common={})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text((tiny / name).read_text())
    return network


def _metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    by_type = rope.get("full_attention", rope)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.freq_base": float(by_type["rope_theta"]),
        "rope.dimension_count": int(width * by_type.get("partial_rotary_factor", 1.0)),
        "rope.scaling.type": "yarn" if by_type["rope_type"] == "yarn" else None,
        "rope.scaling.factor": by_type.get("factor"),
        "rope.scaling.original_context_length": by_type.get("original_max_position_embeddings"),
        "attention.sliding_window": config.get("sliding_window") if arch in _WITH_WINDOWS else None,
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size") if arch == "qwen3moe" else None,
        "expert_used_count": config.get("num_experts_per_tok"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    if arch == "deepseek2":
        values |= _latent_metadata(config, rope)
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}


def _latent_metadata(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's keys, as in newer files: heads as llama.cpp computes them, with latent keys."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    is_third = config["model_type"] == "deepseek_v3"
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID if is_third else ExpertGatingFuncType.SOFTMAX),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _by_number(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class TwistedSource(Source):
    """A checkpoint in the words of a GGUF file of its architecture."""

    def __init__(self, checkpoint: Path, kind: gguf.GGMLQuantizationType = F32) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        super().__init__(checkpoint, kind)
        self.arch = ARCHITECTURES[config["model_type"]]
        self.metadata = _metadata(config, self.arch) | tokenizer_metadata(checkpoint)
        arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == self.arch)
        names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
        self.tensors = {}
        experts: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name in sorted(self.weights, key=_by_number):
            value = self.weights[name]
            expert = _EXPERT.fullmatch(name)
            if expert is not None:
                layer = expert[1].replace("model.layers.", "blk.")
                experts.setdefault(f"{layer}ffn_{_EXPERT_PARTS[expert[3]]}_exps.weight", []).append(value)
                continue
            if ".mlp.experts." in name:  # GPT-OSS: matrices of all experts, transposed, gates and up alternating
                self._take_apart(name.replace("model.layers.", "blk."), value)
                continue
            if name.endswith("block_sparse_moe.input_linear.weight"):  # Granite: gates above ups
                layer = name.removesuffix("block_sparse_moe.input_linear.weight").replace("model.layers.", "blk.")
                for part, one in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
                    self.tensors[f"{layer}ffn_{part}_exps.weight"] = one, kind
                continue
            if name.endswith("kv_b_proj.weight"):
                self._split_heads(names, name, value)
                continue
            if name.endswith("e_score_correction_bias"):
                name = name.replace("_bias", ".bias")
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            theirs = f"{theirs}.weight" if name.endswith("sinks") else theirs
            assert theirs is not None, name
            if self.arch.startswith("gemma") and name.endswith("norm.weight"):
                value = value + 1
            if self.arch in _PAIRING_ROWS and name.endswith(("q_proj.weight", "k_proj.weight")):
                value = permuted(value, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
            self.tensors[theirs] = value, kind if value.ndim > 1 else F32
        for theirs, each in experts.items():
            self.tensors[theirs] = np.stack(each), kind

    def _split_heads(self, names: gguf.TensorNameMap, name: str, value: np.ndarray[Any, Any]) -> None:
        """The up projection of keys and values, head by head, that of keys transposed."""
        heads = value.reshape(self.config["num_attention_heads"], -1, value.shape[1])
        width = self.config["qk_nope_head_dim"]
        for part, each in (("k", heads[:, :width].swapaxes(1, 2)), ("v", heads[:, width:])):
            theirs = names.get_name(name.replace("kv_b_proj", f"{part}_b_proj"), try_suffixes=(".weight",))
            assert theirs is not None
            self.tensors[theirs] = each, self.kind

    def as_older_file(self) -> None:
        """What llama.cpp's converter wrote of DeepSeek V2 and V3 until 2025: heads, and the up
        projection of keys and values, as the checkpoint has them, and no groups.
        """
        for name in [each for each in self.tensors if each.endswith("attn_k_b.weight")]:
            keys, values = (self.tensors.pop(each)[0] for each in (name, name.replace("k_b", "v_b")))
            both = np.concatenate((keys.swapaxes(1, 2), values), 1)
            self.tensors[name.replace("k_b", "kv_b")] = both.reshape(-1, both.shape[2]), self.kind
        for key in ("key_length_mla", "value_length_mla"):
            self.metadata[f"deepseek2.attention.{key.removesuffix('_mla')}"] = self.metadata.pop(
                f"deepseek2.attention.{key}"
            )
        self.metadata["deepseek2.attention.head_count_kv"] = self.config["num_attention_heads"]
        for key in ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"):
            self.metadata.pop(f"deepseek2.{key}", None)
        if self.config["model_type"] == "deepseek_v2":
            del self.metadata["deepseek2.expert_gating_func"]

    def _take_apart(self, name: str, value: np.ndarray[Any, Any]) -> None:
        layer, _, part = name.partition("mlp.experts.")
        is_bias = part.endswith("_bias")
        value = value if is_bias else value.swapaxes(1, 2)
        for which, one in (
            (("gate", value[:, ::2]), ("up", value[:, 1::2])) if "gate_up" in part else (("down", value),)
        ):
            stored = one, F32 if is_bias else self.kind
            self.tensors[f"{layer}ffn_{which}_exps.{'bias' if is_bias else 'weight'}"] = stored

    def _architecture(self) -> dict[str, Any]:
        return {}
