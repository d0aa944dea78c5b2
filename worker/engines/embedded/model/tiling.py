"""Numbers of rows that a GEMM is called with, so that it is batch-invariant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from worker.engines.embedded.model.gemm import GemmBackend


class LayerShape(NamedTuple):
    """Properties of a `Linear` that its tiling depends on; attributes as there."""

    out_features: int
    in_features: int
    gemm: type[GemmBackend]
    is_unrounded: bool = False
    activation: str | None = None


@dataclass(frozen=True, slots=True)
class GemmTiling:
    """Numbers of rows that a GEMM is called with: multiples of `step` up to `most`, and `blocks`.

    A GEMM kernel chooses its order of summation by the number of rows. So a layer whose kernel is
    not batch-invariant by construction is called with few different numbers, which are tried at
    start: rows are padded to a multiple of `step` and split into tiles of at most `most`.

    Attributes:
        step: Divisor of numbers of rows, to a multiple of which they are padded.
        most: Rows of a tile at most; None for any number.
        blocks: Further numbers, multiples of `step` above `most`, largest first. Long prompts are
            computed faster in them.
    """

    step: int = 1
    most: int | None = None
    blocks: tuple[int, ...] = ()

    def fits(self, rows: int) -> bool:
        """Whether a GEMM of `rows` rows needs neither padding nor splitting."""
        return rows in self.blocks or (rows % self.step == 0 and (self.most is None or rows <= self.most))

    def split(self, rows: int) -> Iterator[slice]:
        """`rows` rows, a multiple of `step`, in slices that fit."""
        start = 0
        while start < rows:
            left = rows - start
            count = next((block for block in self.blocks if block <= left), min(left, self.most or left))
            yield slice(start, start + count)
            start += count
