"""The type of a tensor in a pipe: logits, probabilities or token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class TensorType(Enum):
    """Meaning of a tensor."""

    LOGITS = 1
    """Real scores, ``[B, V]``; -inf is a masked token."""
    PROBS = 2
    """Probabilities, ``[B, V]``; they need not sum to 1, and negative ones count as 0."""
    INDICES = 3
    """Token ids, ``[B]``: the end of a pipe."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"TensorType.{self.name}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TaggedTensor:
    """A tensor and its meaning; torch functions take it as the tensor and return plain tensors."""

    data: torch.Tensor
    type: TensorType

    @staticmethod
    def logits(t: torch.Tensor) -> TaggedTensor:
        return TaggedTensor(t, TensorType.LOGITS)

    @staticmethod
    def probs(t: torch.Tensor) -> TaggedTensor:
        return TaggedTensor(t, TensorType.PROBS)

    @staticmethod
    def indices(t: torch.Tensor) -> TaggedTensor:
        return TaggedTensor(t, TensorType.INDICES)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_plain(args), **_plain(dict(kwargs or {})))

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or its entry ``dim``."""
        return self.data.shape if dim is None else self.data.shape[dim]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaggedTensor):
            return NotImplemented
        same_kind = (self.type, self.dtype, self.device) == (other.type, other.dtype, other.device)
        return same_kind and torch.equal(self.data, other.data)

    def __hash__(self) -> int:
        return hash((self.type, self.dtype, self.shape))

    def __repr__(self) -> str:
        return f"TaggedTensor(type={self.type}, shape={self.shape}, dtype={self.dtype}, device={self.device})"


def _plain(value: Any) -> Any:
    """``value`` with tagged tensors in nested lists, tuples and dicts replaced by tensors."""
    if isinstance(value, TaggedTensor):
        return value.data
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
