"""Linear layers of transformers' causal language models by the names that peft knows them by."""

from __future__ import annotations

from typing import Any

from transformers.pytorch_utils import Conv1D

Shapes = dict[str, tuple[int, int] | None]
"""Shapes ``[N, K]`` by name; None for those of experts."""


def linear_shapes(network: Any) -> tuple[Shapes, frozenset[str]]:
    """All weights ``[N, K]`` of a network that nothing has been replaced in yet, embeddings among
    them.

    Args:
        network: transformers' causal language model.

    Returns:
        Shapes by the names of their modules; and names of weights that are held as ``[K, N]``.
    """
    shapes: Shapes = {}
    transposed: set[str] = set()
    for name, module in network.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, Conv1D):
            transposed.add(name)
        if weight is not None and len(weight.shape) == 2:
            rows, columns = weight.shape[::-1] if name in transposed else weight.shape
            shapes[name] = rows, columns
        elif is_of_experts(module):
            shapes |= dict.fromkeys([name, *_names_of_experts(name, module)])
    return shapes, frozenset(transposed)


def is_of_experts(module: Any) -> bool:
    """Whether it is one of transformers' interface of experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _names_of_experts(name: str, experts: Any) -> list[str]:
    """Names of the experts' linear layers where each is a module of its own, as it once was."""
    parts = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    return [f"{name}.{index}.{part}" for index in range(int(experts.num_experts)) for part in parts]
