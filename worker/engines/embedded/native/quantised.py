"""Quantised weights packed into panels, whose codes the GEMMs unpack in registers.

They belong to the kernels in float32; rows and results may be bfloat16 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.engines.embedded.native.packed import COLUMNS, fill_panels
from worker.engines.embedded.native.whole_scales import span_of, step_of

ROUNDINGS = ("none", "int8", "bfloat16")
"""Data types that rows are rounded to before they are multiplied by a quantised weight."""

BLOCK = 32
"""Elements whose products with rows in int8 are added before a scale meets them, at most:
``BLOCK`` in ``rounded_rows.h``.
"""


def fits_blocks(group: int, inner: int) -> bool:
    """Whether weights in groups of this size, in rows of `inner`, can meet rounded rows."""
    return group == inner or not group % BLOCK or not (BLOCK % group or group < 8)


@dataclass(frozen=True, slots=True)
class QuantisedPanels:
    """A quantised weight ``[N, K]`` in panels of 32 rows, each ``scale * code + offset``, or each
    ``scale * 2 * code`` where codes are numbers of e2m1.

    Attributes:
        codes: ``[ceil(N / 32), K, 32]`` int8; or ``[ceil(N / 32), K / 8, 32]`` int32, each eight
            codes of 4 bits without a sign, the first one lowest; or, of 8 bits where rows are
            rounded to int8, ``[ceil(N / 32), ceil(K / 4), 32]`` int32, each four codes with a sign.
        scales: ``[ceil(N / 32), groups of a row, 32]``, float16 or float32, all finite.
        offsets: Offsets of the groups, like `scales`; None where each is `zero` times its scale.
        zero: See `offsets`; a whole number.
        bits: Bits of a code, 4 or 8.
        columns: N.
        inner: K.
        rounds_to: One of `ROUNDINGS`.
        is_e2m1: Whether codes, of 4 bits, are numbers of e2m1, without offsets.
        steps: Scales and offsets as whole numbers, panels of what `whole_scales` makes; None where
            rows are not rounded to int8.
        units: Units of the steps, likewise.

    Raises:
        ValueError: a tensor has another shape or data type, or there is no such rounding.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    zero: float
    bits: int
    columns: int
    inner: int
    rounds_to: str
    is_e2m1: bool = False
    steps: torch.Tensor | None = None
    units: torch.Tensor | None = None

    def __post_init__(self) -> None:
        per_word = {8: 4 if self.rounds_to == "int8" else 1, 4: 8}.get(self.bits, 0)
        dtype = torch.int8 if per_word == 1 else torch.int32
        scales = self.scales
        if (
            not per_word
            or self.rounds_to not in ROUNDINGS
            or self.codes.dtype != dtype
            or tuple(self.codes.shape) != self._panels_shape(-(-self.inner // per_word))
            or scales.dtype not in (torch.float16, torch.float32)
            or scales.dim() != 3
            or tuple(scales.shape) != self._panels_shape(scales.shape[1])
            or not scales.shape[1]
            or self.inner % scales.shape[1]
            or (self.bits == 4 and self.group % 8)
            or (self.is_e2m1 and (self.bits != 4 or self.offsets is not None or self.zero != 0.0))
            or (self.rounds_to == "int8" and not fits_blocks(self.group, self.inner))
            or not self._has_steps_if_any()
            or (self.offsets is not None and (self.offsets.shape != scales.shape or self.offsets.dtype != scales.dtype))
        ):
            raise ValueError(f"codes {list(self.codes.shape)} are no weight of shape {[self.columns, self.inner]}")

    def _has_steps_if_any(self) -> bool:
        """Whether there are steps and units of the right shapes where rows are rounded to int8, and
        none where they are not.
        """
        if self.rounds_to != "int8" or self.steps is None or self.units is None:
            return self.rounds_to != "int8" and self.steps is None and self.units is None
        dtype = torch.int16 if self.offsets is None else torch.int32
        return (
            (self.steps.dtype, self.units.dtype) == (dtype, torch.float32)
            and tuple(self.steps.shape) == self._panels_shape(-(-self.inner // self.step))
            and tuple(self.units.shape) == self._panels_shape(1)
        )

    def _panels_shape(self, rows: int) -> tuple[int, int, int]:
        return -(-self.columns // COLUMNS), rows, COLUMNS

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((self.columns, self.inner))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.codes, self.scales, self.offsets, self.steps, self.units)
        return sum(one.nbytes for one in tensors if one is not None)

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.inner // self.scales.shape[1]

    @property
    def step(self) -> int:
        """Weights of a row that share a step."""
        return step_of(self.group, self.inner)

    @property
    def span(self) -> int:
        """Elements of a rounded row that share a scale."""
        return span_of(self.inner)


def panels_of(rows: torch.Tensor) -> torch.Tensor:
    """``rows [N, n]`` as panels ``[ceil(N / 32), n, 32]``; missing rows of the last one are 0."""
    panels = torch.empty(-(-len(rows) // COLUMNS), rows.shape[1], COLUMNS, dtype=rows.dtype)
    fill_panels(rows, panels)
    return panels
