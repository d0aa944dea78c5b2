"""The model of the benchmarks: a Llama of about 125 million random parameters in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_checkpoint(path: Path, vocabulary: int = 32_000, longest: int = 4096) -> int:
    """Write the checkpoint, without a tokenizer; returns the bytes of weights that a step reads.

    Args:
        path: An existing directory.
        vocabulary: Width of the logits.
        longest: The model's own limit, prompt and answer.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=vocabulary,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    network: Any = LlamaForCausalLM(config)
    network.to(torch.bfloat16)
    network.save_pretrained(path)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return 2 * int(parameters - network.model.embed_tokens.weight.numel())
