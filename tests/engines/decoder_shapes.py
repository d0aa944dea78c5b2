"""Two odd shapes of every model type that transformers' own code can compute, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import random_checkpoints
import torch
from transformers import AutoModelForCausalLM

from worker.models.model_table import TABLE

KINDS = tuple(row.name for row in TABLE.values() if row.network in ("native", "transformers"))
"""The model types."""

SHAPES: tuple[dict[str, Any], ...] = (
    {"sliding_window": 24},
    {
        "vocab_size": 307,
        "hidden_size": 96,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "sliding_window": 9,
        "tie_word_embeddings": True,
    },
)
"""Settings of both shapes: a window shorter than the prompts, grouped heads, tied embeddings."""

_EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_ROUTED = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LATENT = (
    {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    {"q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 18},
)
_LATENT_KINDS = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu")
_ROUTED_KINDS = (
    *("axk1", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("sarvam_mla", "sarvam_moe", "solar_open"),
)
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_ALSO: dict[str, dict[str, Any]] = {
    "beam": {"num_experts": 6, "n_group": 2, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt_oss": {"rope_parameters": _PLAIN},
    "granite": {
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "granite_swa": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 2.0,
        "layer_rope_theta": [0.0, 10_000.0, 300.0],
    },
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True},
    "granitemoe": {"attention_multiplier": 0.1},
    "granitemoe_swa": {"attention_multiplier": 0.1},
    "granitemoeshared": {"attention_multiplier": 0.1, "shared_intermediate_size": 48},
}
_ALTERNATING = ("cwm", "exaone4", "gemma3_text", "ministral", "olmo3", "smollm3")
"""Types whose layers would all be of one kind: so few of them are the first ones alone."""

_SCALED_EMBEDDINGS = ("biogpt", "gemma", "gemma2", "gemma3_text", "vaultgemma")
"""Types whose random networks would answer one token again and again if they were tied."""

_DERIVED_HEADS = ("falcon",)
"""Types whose configuration derives the width of a head."""


def settings(kind: str, shape: int) -> dict[str, Any]:
    """Settings of a model type in one of `SHAPES`."""
    found = random_checkpoints.COMMON | SHAPES[shape]
    if "experts" in TABLE[kind].features:
        found |= _ROUTED if kind in _ROUTED_KINDS else _EXPERTS
    found |= _ALSO.get(kind, {})
    if kind in _LATENT_KINDS:
        found |= _LATENT[shape]
        found |= {"num_key_value_heads": found["num_attention_heads"], "head_dim": found["qk_rope_head_dim"]}
    if kind in _SCALED_EMBEDDINGS:
        found["tie_word_embeddings"] = False
    if kind in _ALTERNATING:
        kinds = ["sliding_attention", "full_attention"] * found["num_hidden_layers"]
        found["layer_types"] = kinds[: found["num_hidden_layers"]]
    if kind == "diffllama":
        found["num_key_value_heads"] = 2  # of which it makes pairs
    if kind in _DERIVED_HEADS:
        del found["head_dim"]
    if "sliding window" not in TABLE[kind].features:
        del found["sliding_window"]  # transformers' KV cache would read it, and its layers would not
    return found


def write(path: Path, kind: str, shape: int) -> Any:
    """The network of a random checkpoint, as transformers reads it."""
    random_checkpoints.write(path, kind, settings(kind, shape), common={})
    network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return network.eval()
