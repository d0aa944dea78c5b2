"""Random checkpoints of model types that `worker.tiny_model` does not write, made by
transformers; no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from worker.tiny_model import ARCHITECTURES

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16, "sliding_window": 24, "tie_word_embeddings": False}
MIXTURE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
TYPES: dict[str, dict[str, Any]] = {
    "gemma2": {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_moe": {**MIXTURE, "norm_topk_prob": True},
}
"""Settings by model type, of those that run transformers' own code."""

EVERY_TYPE = (*ARCHITECTURES, *TYPES)
"""Every model type whose tensors are known before transformers is asked."""


def ids_of(checkpoint: Path) -> dict[str, Any]:
    """Size of the vocabulary and special ids of a checkpoint, as `settings` of `write`."""
    config = json.loads((checkpoint / "config.json").read_text())
    return {name: config[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}


def write(path: Path, model_type: str, settings: dict[str, Any], common: dict[str, Any] = COMMON) -> Any:
    """A random network of this type, whose answers do not repeat one token, and its checkpoint."""
    maker: Any = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = maker.from_config(AutoConfig.for_model(model_type, **(common | settings)), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
                elif "norm" in name or "bias" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    network.save_pretrained(path)
    return network.eval()
