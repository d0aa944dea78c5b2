"""Rows of a quantised KV cache: a head's keys or values of one token as codes and one scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SCALE_BYTES = 4
_MULTIPLE = 8
_HIGHEST = {torch.int8: 127, torch.int16: 2047}
"""Largest magnitude of a code. In int16 12 bits, so that 32 hold the sum of as many products with a
query's codes as the widest head of the native kernels has elements.
"""

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Format of a quantised KV store's rows, written and read in torch.

    An element is ``code * scale``: symmetric, with one float32 scale for each row, so that a row
    depends on nothing but what was written to it. `native/kv_rows.h` has the same bits.

    Attributes:
        head_dim: Elements of a row, D.
        dtype: Data type of the elements before and after.
        codes: Data type of the codes, and of the store's tensors: int8 or int16.
    """

    head_dim: int
    dtype: torch.dtype
    codes: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of a row: D codes, zeros, and in the last four bytes the scale; a multiple of 8."""
        return -(-(self.head_dim * self.codes.itemsize + _SCALE_BYTES) // _MULTIPLE) * _MULTIPLE

    @property
    def width(self) -> int:
        """Size of a row in elements of `codes`: the last dimension of the store's tensors."""
        return self.num_bytes // self.codes.itemsize

    @property
    def short_name(self) -> str:
        """Name of the codes' data type, one of `config.KV_CACHE_DTYPES`."""
        return str(self.codes).removeprefix("torch.")

    @property
    def name(self) -> str:
        """Name of the format, which the KV of two workers must have in common."""
        return f"{self.short_name} of {str(self.dtype).removeprefix('torch.')}"

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., width]`` of `codes` of ``x [..., D]``.

        The scale is max |x| / 127, in int16 / 2047; a code is x / scale rounded to the nearest
        integer, ties to even. A row of numbers so small that its scale would be subnormal is all 0;
        one with an infinity or a NaN is NaN everywhere, so that whatever attends to it is not a
        number either.
        """
        x = x.float()
        highest = x.abs().amax(-1, keepdim=True)
        most = torch.full_like(highest, _HIGHEST[self.codes])
        scale = highest / most  # CUDA multiplies by the inverse of a number
        scale.masked_fill_(scale < _SMALLEST, 0.0).masked_fill_(~highest.isfinite(), torch.nan)
        codes = torch.where(scale > 0, (x / scale).round_(), 0.0)
        rows = torch.zeros(*x.shape[:-1], self.width, dtype=self.codes, device=x.device)
        rows[..., : self.head_dim] = codes
        rows[..., self._scale_begin :] = scale.view(self.codes)
        return rows

    def dequantise(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` of rows ``[..., width]``, which may be a strided view of the store."""
        scale = rows[..., self._scale_begin :].view(torch.float32)
        return (rows[..., : self.head_dim].float() * scale).to(self.dtype)

    @property
    def _scale_begin(self) -> int:
        return self.width - _SCALE_BYTES // self.codes.itemsize
