"""Copies of third-party processors, which keep their states."""

from __future__ import annotations

import copy
from typing import Any

import torch

_LARGE_BYTES = 65536


def copied(wrapped: Any, like: Any = None) -> Any:
    """A deep copy that shares the tokenizer, since copying one takes longer than a step.

    Args:
        wrapped: Third-party processor to copy.
        like: An earlier copy that will not be called again. Large tensors that are still equal are
            shared with it, those of networks too, so that tables of megabytes are not saved once
            per position.
    """
    attributes, known = getattr(wrapped, "__dict__", {}), getattr(like, "__dict__", {})
    shared: dict[int, Any] = {}
    for name, value in attributes.items():
        if hasattr(value, "encode") and hasattr(value, "decode"):
            shared[id(value)] = value
        elif isinstance(value, torch.Generator):
            shared[id(value)] = value.clone_state()
        else:
            others = _tables(known.get(name))
            shared |= {
                id(table): others[part] for part, table in _tables(value).items() if _is_same(table, others.get(part))
            }
    return copy.deepcopy(wrapped, shared)


def _tables(value: Any) -> dict[str, torch.Tensor]:
    """Tensors of an attribute by name: itself, or the parameters and buffers of a network."""
    if isinstance(value, torch.nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    return {"": value} if isinstance(value, torch.Tensor) else {}


def _is_same(value: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None:
        return False
    alike = value.dtype == other.dtype and value.device == other.device and value.shape == other.shape
    return alike and value.numel() * value.element_size() >= _LARGE_BYTES and torch.equal(value, other)
