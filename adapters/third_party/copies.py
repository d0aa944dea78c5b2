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
            shared with it, so that tables of megabytes are not saved once per position.
    """
    attributes, known = getattr(wrapped, "__dict__", {}), getattr(like, "__dict__", {})
    shared: dict[int, Any] = {}
    for name, value in attributes.items():
        if hasattr(value, "encode") and hasattr(value, "decode"):
            shared[id(value)] = value
        elif isinstance(value, torch.Generator):
            shared[id(value)] = value.clone_state()
        elif _is_same_table(value, known.get(name)):
            shared[id(value)] = known[name]
    return copy.deepcopy(wrapped, shared)


def _is_same_table(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    alike = value.dtype == other.dtype and value.device == other.device and value.shape == other.shape
    return alike and value.numel() * value.element_size() >= _LARGE_BYTES and torch.equal(value, other)
