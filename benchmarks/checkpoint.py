"""The models of the benchmarks: Llamas of random parameters in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_checkpoint(
    path: Path, vocabulary: int = 32_000, longest: int = 4096, layers: int = 12, rope_factor: float = 1.0
) -> int:
    """Write a checkpoint, without a tokenizer; returns the bytes of weights that a step reads.

    With 12 layers it has about 125 million parameters.

    Args:
        path: An existing directory.
        vocabulary: Width of the logits.
        longest: The model's own limit, prompt and answer.
        layers: Number of the decoder's layers.
        rope_factor: Divisor of the positions that RoPE turns by (``linear``), if it is not 1.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=vocabulary,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        | ({} if rope_factor == 1 else {"rope_type": "linear", "factor": rope_factor}),
    )
    network: Any = LlamaForCausalLM(config)
    network.to(torch.bfloat16)
    network.save_pretrained(path)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return 2 * int(parameters - network.model.embed_tokens.weight.numel())
