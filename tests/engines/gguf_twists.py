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
from gguf.constants import MODEL_ARCH_NAMES
from gguf_files import F32, Source, permuted, tokenizer_metadata

ARCHITECTURES = {
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
_CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 7, "rope_parameters": None},
    "gpt_oss": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **_YARN}
    },
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
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}


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
