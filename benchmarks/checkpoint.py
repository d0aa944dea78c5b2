"""The models of the benchmarks: Llamas of random parameters in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a Llama whose heads have a width of 64."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return 64 * self.heads


SMALL = Size(layers=12, heads=12, kv_heads=4, intermediate=2048)
"""About 125 million parameters."""

LARGE = Size(layers=16, heads=32, kv_heads=8, intermediate=8192)
"""About 1.1 billion parameters."""


def write_checkpoint(
    path: Path, vocabulary: int = 32_000, longest: int = 4096, size: Size = SMALL, rope_factor: float = 1.0
) -> int:
    """Write a checkpoint, without a tokenizer; returns the bytes of weights that a step reads.

    Args:
        path: An existing directory.
        vocabulary: Width of the logits.
        longest: The model's own limit, prompt and answer.
        size: Numbers of layers and heads, and the width of the MLP.
        rope_factor: Divisor of the positions that RoPE turns by (``linear``), if it is not 1.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
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
