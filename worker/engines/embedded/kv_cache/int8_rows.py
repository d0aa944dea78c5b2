"""Rows of the int8 KV cache: a head's keys or values of one token as int8 codes and one scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SCALE_BYTES = 4
_MULTIPLE = 8
_HIGHEST = 127
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Format of an int8 KV store's rows, written and read in torch.

    An element is ``code * scale``: symmetric, with one float32 scale for each row, so that a row
    depends on nothing but what was written to it. `native/kv_rows.h` has the same bits.

    Attributes:
        head_dim: Elements of a row, D.
        dtype: Data type of the elements before and after.
    """

    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of a row: D codes, zeros, and in the last four bytes the scale; a multiple of 8."""
        return -(-(self.head_dim + _SCALE_BYTES) // _MULTIPLE) * _MULTIPLE

    @property
    def name(self) -> str:
        """Name of the format, which the KV of two workers must have in common."""
        return f"int8 of {str(self.dtype).removeprefix('torch.')}"

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., num_bytes]`` int8 of ``x [..., D]``.

        The scale is max |x| / 127, a code x / scale rounded to the nearest integer, ties to even.
        A row of numbers so small that its scale would be subnormal is all 0; one with an infinity
        or a NaN is NaN everywhere, so that whatever attends to it is not a number either.
        """
        x = x.float()
        highest = x.abs().amax(-1, keepdim=True)
        scale = highest / torch.full_like(highest, _HIGHEST)  # CUDA multiplies by the inverse of a number
        scale.masked_fill_(scale < _SMALLEST, 0.0).masked_fill_(~highest.isfinite(), torch.nan)
        codes = torch.where(scale > 0, (x / scale).round_(), 0.0)
        rows = torch.zeros(*x.shape[:-1], self.num_bytes, dtype=torch.int8, device=x.device)
        rows[..., : self.head_dim] = codes
        rows[..., -_SCALE_BYTES:] = scale.view(torch.int8)
        return rows

    def dequantise(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` of rows ``[..., num_bytes]``, which may be a strided view of the store."""
        scale = rows[..., -_SCALE_BYTES:].view(torch.float32)
        return (rows[..., : self.head_dim].float() * scale).to(self.dtype)
