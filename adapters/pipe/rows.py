"""Refuses rows with NaN, infinite scores or no token left, before any op."""

from __future__ import annotations

import torch

from adapters.pipe.types import TensorType


def checked_rows(data: torch.Tensor, meaning: TensorType) -> torch.Tensor:
    """``data`` in float32, or float64 if it was; negative probabilities are 0 in it.

    One read of the rows and, on CUDA, one synchronisation.

    Raises:
        ValueError: it is not a floating-point ``[B, V]``, or a row holds NaN or +inf, or has no
            token, or none left.
    """
    if not isinstance(data, torch.Tensor):
        raise ValueError(f"expected a floating-point tensor [batch, vocabulary], got {type(data).__name__}")
    if data.dim() != 2 or not data.is_floating_point():
        raise ValueError(f"expected a floating-point tensor [batch, vocabulary], got {data.dtype} {list(data.shape)}")
    if len(data) and not data.shape[1]:
        raise ValueError(f"expected a vocabulary of at least one token, got {list(data.shape)}")
    rows = data if data.dtype in (torch.float32, torch.float64) else data.float()
    if meaning is TensorType.PROBS:
        rows = rows.clamp_min(0.0)
    check_highest(rows, meaning)
    return rows


def check_highest(rows: torch.Tensor, meaning: TensorType) -> None:
    """Raises `ValueError` for NaN, for a value out of range and for a row with no token left."""
    if rows.numel() == 0:
        return
    least, most = -torch.inf, torch.inf
    if meaning is TensorType.PROBS:
        least, most = 0.0, torch.finfo(rows.dtype).max / rows.shape[1]
    highest = rows.amax(-1)
    bad = ~((highest > least) & (highest < most))
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(_reason(row, float(highest[row]), least, meaning))


def _reason(row: int, highest: float, least: float, meaning: TensorType) -> str:
    if highest != highest:
        return f"row {row} holds NaN"
    if highest <= least:
        return f"row {row} has no token left: " + ("no logit is finite" if least < 0 else "no probability is above 0")
    return f"row {row} holds {highest}" if meaning is TensorType.LOGITS else f"row {row} is too large: {highest}"
