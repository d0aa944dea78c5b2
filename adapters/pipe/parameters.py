"""Parameters of a call: one value for all rows or one per row, checked before computing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PerRow:
    """A checked parameter.

    Attributes:
        given: The scalar, or the 1-D tensor, as the caller gave it.
        values: One number per row.
    """

    given: float | torch.Tensor
    values: list[float]

    def column(self, like: torch.Tensor) -> torch.Tensor:
        """``[B, 1]`` with the dtype and on the device of ``like``."""
        return torch.tensor(self.values, dtype=like.dtype).unsqueeze(1).to(like.device, non_blocking=True)


def temperatures(value: Any, num_rows: int) -> PerRow:
    """Positive and finite.

    Raises:
        ValueError: it is not; so do the functions below.
    """
    return _per_row(value, num_rows, Real, _is_temperature, "Temperature must be positive float or a tensor array")


def top_ks(value: Any, num_rows: int) -> PerRow:
    """Integers from 1; those beyond the vocabulary keep all."""
    message = "top_k must be a positive integer or a tensor array"
    return _per_row(value, num_rows, Integral, lambda k: k >= 1, message)


def top_ps(value: Any, num_rows: int) -> PerRow:
    """Numbers in (0, 1]."""
    return _per_row(value, num_rows, Real, lambda p: 0 < p <= 1, "top_p must be float in (0, 1] or a tensor array")


def min_ps(value: Any, num_rows: int) -> PerRow:
    """Numbers in (0, 1]; a tensor may hold 0, for the rows of a mixed batch that want no min-p."""
    accepts: Callable[[float], bool] = lambda p: 0 < p <= 1  # noqa: E731
    if isinstance(value, torch.Tensor):
        accepts = lambda p: 0 <= p <= 1  # noqa: E731
    return _per_row(value, num_rows, Real, accepts, "min_p must be float in (0, 1] or a tensor array")


def row_indices(value: Any, num_rows: int) -> torch.Tensor | None:
    """None, or int32 or int64 ``[n]`` with the row of every sample.

    Raises:
        ValueError: it has another shape or dtype, or a row index is out of range.
    """
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices must be a 1D tensor of int32 or int64, got {_kind(value)}")
    if len(value):
        lowest, highest = (int(end) for end in value.aminmax())
        if lowest < 0 or highest >= num_rows:
            raise ValueError(f"indices must be rows from 0 to {num_rows - 1}, got {lowest} to {highest}")
    return value


def generator_of(value: Any) -> torch.Generator | None:
    """A torch generator or None.

    Raises:
        ValueError: it is something else.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {_kind(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _is_temperature(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _per_row(
    value: Any, num_rows: int, kind: type[Real] | type[Integral], accepts: Callable[[float], bool], message: str
) -> PerRow:
    if isinstance(value, torch.Tensor):
        return PerRow(value, _tensor_values(value, num_rows, kind, accepts, message))
    if isinstance(value, bool) or not isinstance(value, kind) or not accepts(float(value)):
        raise ValueError(message)
    number = int(value) if isinstance(value, Integral) else float(value)
    return PerRow(number, [number] * num_rows)


def _tensor_values(
    value: torch.Tensor,
    num_rows: int,
    kind: type[Real] | type[Integral],
    accepts: Callable[[float], bool],
    message: str,
) -> list[float]:
    check_length(value, num_rows)
    if value.dtype == torch.bool or value.is_complex() or (kind is Integral and value.is_floating_point()):
        raise ValueError(f"{message}, got a tensor of {value.dtype}")
    values: list[float] = value.tolist()
    for row, number in enumerate(values):
        if not accepts(number):
            raise ValueError(f"{message}, got {number} for row {row}")
    return values


def check_length(value: torch.Tensor, num_rows: int) -> None:
    """Raises `ValueError` unless ``value`` is 1-D with one element for each row."""
    if value.dim() == 0:
        raise ValueError(
            "Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, "
            "but got a 0-dimensional tensor."
        )
    if value.dim() > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for the sampling parameter, but got a {value.dim()}D tensor.")
    if len(value) != num_rows:
        raise ValueError(
            f"Sampling parameter tensor batch size mismatch: expected length {num_rows} "
            f"to match the reference tensor batch size, but got length {len(value)}."
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dim()}D tensor of {value.dtype}"
    return type(value).__name__
