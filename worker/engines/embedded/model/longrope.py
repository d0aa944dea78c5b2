"""LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753) with the factors of one context.

transformers divides the frequencies of RoPE by the long factors once the longest sequence of a
batch is longer than the context of pretraining, and by the short ones before: keys in a KV cache
would change as a sequence grows. A worker uses one of the two for all its sequences.
"""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.models.problems import ModelFileError

_KIND = "longrope"


def check_factors(config: Any) -> None:
    """Raises `ModelFileError` unless transformers' configuration has a factor for each pair of
    elements that is rotated.
    """
    for rope in _ropes(config).values():
        if rope.get("rope_type") != _KIND:
            continue
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        for key in ("short_factor", "long_factor"):
            if len(rope[key]) != pairs:
                raise ModelFileError(
                    f"config.json: {key} of RoPE must have {pairs} items, one for each pair that is rotated, "
                    f"got {len(rope[key])}"
                )


def settle_factors(network: Any, context_length: int | None) -> str | None:
    """Give transformers' RoPEs the factors of a context, for sequences of every length.

    Args:
        network: transformers' causal language model, which is changed.
        context_length: Longest sequence that it will compute, in tokens; None for its own limit.

    Returns:
        ``long`` where that is longer than the context of pretraining, else ``short``; None for a
        network without LongRoPE.
    """
    chosen: set[str] = set()
    for rotary in [module for module in network.modules() if hasattr(module, "rope_type")]:
        of_types = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
        for layer_type in [each for each, kind in of_types.items() if kind == _KIND]:
            chosen.add(_settle(rotary, layer_type, context_length))
            if layer_type:
                rotary.rope_type = rotary.rope_type | {layer_type: "default"}
            else:
                rotary.rope_type = "default"  # which `forward` changes no frequencies of
    return "long" if "long" in chosen else min(chosen, default=None)


def _settle(rotary: Any, layer_type: str, context_length: int | None) -> str:
    config = rotary.config
    original = _ropes(config)[layer_type]["original_max_position_embeddings"]
    longest = context_length or config.max_position_embeddings
    named = {"layer_type": layer_type} if layer_type else {}
    frequencies, _ = ROPE_INIT_FUNCTIONS[_KIND](config, None, seq_len=longest, **named)
    buffer = getattr(rotary, f"{layer_type}_inv_freq" if layer_type else "inv_freq")
    buffer.copy_(frequencies)
    return "long" if longest > original else "short"


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE parameters by type of layer; of ``""`` where all layers have one."""
    found = getattr(config, "rope_parameters", None) or {}
    by_type = {key: value for key, value in found.items() if isinstance(value, dict)}
    return by_type or {"": found}
