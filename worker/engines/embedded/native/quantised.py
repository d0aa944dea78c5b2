"""GEMMs on quantised weights, whose codes the native kernels unpack in registers.

They belong to the kernels in float32; rows and results may be bfloat16 too. Results have the bits
of `native.linear` in float32 on the weight that is unpacked; or, where rows are rounded to 8 bits,
the bits that `integer.c` defines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from worker.engines.embedded import native

DTYPES = (torch.float32, torch.bfloat16)
"""Of rows and results."""

BLOCK = 32
"""Elements of a row that are rounded with one scale: ``BLOCK`` in ``integer.c``."""


def fits_blocks(group: int, inner: int) -> bool:
    """Whether weights in groups of this size, in rows of `inner`, can meet rounded rows."""
    return group == inner or not group % BLOCK or not (BLOCK % group or group < 8)


@dataclass(frozen=True, slots=True)
class QuantisedPanels:
    """A quantised weight ``[N, K]`` in panels of 32 rows, each ``scale * code + offset``.

    Attributes:
        codes: ``[ceil(N / 32), K, 32]`` int8; or ``[ceil(N / 32), K / 8, 32]`` int32, each eight
            codes of 4 bits without a sign, the first one lowest; or, of 8 bits where `rounds_rows`,
            ``[ceil(N / 32), ceil(K / 4), 32]`` int32, each four codes with a sign.
        scales: ``[ceil(N / 32), groups of a row, 32]``, float16 or float32, all finite.
        offsets: Likewise; None where each is `zero` times its scale.
        zero: See `offsets`; a whole number.
        bits: Of a code.
        columns: N.
        inner: K.
        rounds_rows: Whether rows that meet the weight are rounded to 8 bits.

    Raises:
        ValueError: a tensor has another shape or data type.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    zero: float
    bits: int
    columns: int
    inner: int
    rounds_rows: bool

    def __post_init__(self) -> None:
        per_word = {8: 4 if self.rounds_rows else 1, 4: 8}.get(self.bits, 0)
        dtype = torch.int8 if per_word == 1 else torch.int32
        scales = self.scales
        if (
            not per_word
            or self.codes.dtype != dtype
            or tuple(self.codes.shape) != self._shape(-(-self.inner // per_word))
            or scales.dtype not in (torch.float16, torch.float32)
            or scales.dim() != 3
            or tuple(scales.shape) != self._shape(scales.shape[1])
            or not scales.shape[1]
            or self.inner % scales.shape[1]
            or (self.bits == 4 and self.group % 8)
            or (self.rounds_rows and not fits_blocks(self.group, self.inner))
            or (self.offsets is not None and (self.offsets.shape != scales.shape or self.offsets.dtype != scales.dtype))
        ):
            raise ValueError(f"codes {list(self.codes.shape)} are no weight of shape {[self.columns, self.inner]}")

    def _shape(self, rows: int) -> tuple[int, int, int]:
        return -(-self.columns // native.COLUMNS), rows, native.COLUMNS

    @property
    def nbytes(self) -> int:
        """Of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (self.offsets.nbytes if self.offsets is not None else 0)

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.inner // self.scales.shape[1]


def panels_of(rows: torch.Tensor) -> torch.Tensor:
    """``rows [N, n]`` as panels ``[ceil(N / 32), n, 32]``; missing rows of the last one are 0."""
    columns = native.COLUMNS
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % columns))
    return padded.view(-1, columns, rows.shape[1]).mT.contiguous()


def unpacked_rows(weight: QuantisedPanels, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[..., K]`` of a quantised weight by their indices.

    Args:
        weight: ``[N, K]``.
        ids: int64 ``[...]``.
        dtype: One of `DTYPES`; the rows are rounded to it from float32.

    Raises:
        IndexError: there is no such row.
    """
    ids = ids.contiguous()
    output = torch.empty(*ids.shape, weight.inner, dtype=dtype)
    missing = native.library(torch.float32).unpack_rows(
        *(weight.codes.data_ptr(), weight.bits, weight.codes.dtype == torch.int32, weight.group),
        *(weight.scales.data_ptr(), native.address(weight.offsets), weight.scales.dtype == torch.float16, weight.zero),
        *(weight.columns, weight.inner, ids.data_ptr(), ids.numel(), dtype == torch.bfloat16, output.data_ptr()),
    )
    if missing:
        raise IndexError(f"a weight of {weight.columns} rows has not all of the rows {ids.tolist()}")
    return output


def kernel(rounds_rows: bool) -> Any:
    """The C function that multiplies by weights of which that is true."""
    library = native.library(torch.float32)
    if not rounds_rows:
        return library.quantised_linear
    return library.integer_linear_amx if native.chosen_path(torch.float32) == "amx" else library.integer_linear


def quantised_linear(
    x: torch.Tensor,
    weight: QuantisedPanels,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    other: torch.Tensor | None = None,
    is_unrounded: bool = False,
) -> torch.Tensor:
    """GEMM: ``x [n, K]`` times a quantised weight ``[N, K]``; arguments as of `native.linear`.

    Raises:
        MemoryError: there is no memory for bfloat16 rows in float32, or for rounded ones.
    """
    rows, inner = x.shape
    x = x.contiguous()
    other = other.contiguous() if other is not None else None
    output = x.new_empty(rows, weight.columns, dtype=torch.float32 if is_unrounded else x.dtype)
    failed = kernel(weight.rounds_rows)(
        *(x.data_ptr(), x.dtype == torch.bfloat16, rows, inner),
        *(weight.codes.data_ptr(), weight.bits, weight.group),
        *(weight.scales.data_ptr(), native.address(weight.offsets), weight.scales.dtype == torch.float16),
        *(weight.zero, weight.columns, native.address(bias), native.EPILOGUES[epilogue], native.address(other)),
        *(output.data_ptr(), is_unrounded, native.team()),
    )
    if failed:
        raise MemoryError(f"no memory for {rows} rows of {inner} elements")
    return output
