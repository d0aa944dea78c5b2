"""Masks and weights of tokens, for sampling on the CPU, by the native kernels in float32.

The weights are those of `adapters.sampling.weights`. Their exponential is the kernels' own: single
multiplications and additions of float64 in one order, so that its bits are the same in all paths
and on every processor. This module is the `adapters.row_kernels.RowKernels` of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch

from adapters.sampling.candidates import BLOCK
from adapters.sampling.weights import rounding, weight_bits
from adapters.sampling.whole_row import find_unit
from worker.engines.embedded.native.libraries import address
from worker.engines.embedded.native.paths import library, unavailable


@cache
def are_available() -> bool:
    """Whether these functions compute here, in any path; the answer holds for the process."""
    return unavailable(torch.float32) is None


def apply_masks(logits: torch.Tensor, rows: Sequence[int], bitmasks: Sequence[torch.Tensor]) -> None:
    """See `adapters.row_kernels.RowKernels.apply_masks`.

    Raises:
        IndexError: there is no such row.
        ValueError: a bitmask is of another type, or there is not one for each row.
    """
    for row, each in zip(rows, bitmasks, strict=True):  # which C would read and write beyond their memory
        if not 0 <= row < len(logits):
            raise IndexError(f"rows must be from 0 to {len(logits) - 1}, got {row}")
        if each.dtype != torch.int32:
            raise ValueError(f"bitmasks must be int32, got {each.dtype}")
    packed = [each.contiguous() for each in bitmasks]
    masks = torch.tensor(
        [(row, each.data_ptr(), each.shape[0]) for row, each in zip(rows, packed, strict=True)], dtype=torch.int64
    )
    kernels = library(torch.float32)
    kernels.apply_masks(
        *(logits.data_ptr(), logits.stride(0), logits.shape[1]), *(masks.data_ptr(), len(packed), kernels.threads())
    )


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """`adapters.sampling.candidates.block_maxima` of float32 ``[R, V]`` on the CPU, twice as fast.

    NaN where a block holds NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    maxima = torch.empty(rows, -(-width // BLOCK), dtype=torch.float32)
    kernels = library(torch.float32)
    kernels.block_maxima(logits.data_ptr(), rows, logits.stride(0), width, maxima.data_ptr(), kernels.threads())
    return maxima


def highest_ids(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """The lowest id that has the highest logit of each row of float32 ``[R, V]`` on the CPU, and
    that logit; NaN where a row holds NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    kernels = library(torch.float32)
    kernels.highest_ids(
        *(logits.data_ptr(), rows, logits.stride(0), width, ids.data_ptr(), values.data_ptr(), kernels.threads())
    )
    return ids.tolist(), values.tolist()


def exponential_(values: torch.Tensor) -> torch.Tensor:
    """``values.exp_()`` of contiguous float64 on the CPU, none above 709, to one unit in the last
    place; 0 below -708, and for NaN.
    """
    library(torch.float32).exponentials(values.data_ptr(), values.numel())
    return values


def weigher(vocab_size: int) -> NativeRow:
    """Weighs rows of `vocab_size` logits."""
    return NativeRow(vocab_size)


class NativeRow:
    """Weights of one row of logits at a time (`adapters.row_kernels.WholeRow`).

    A row is read once for the sums of its blocks; no weight is kept.

    Args:
        width: V, of a row.

    Attributes:
        sums: Sums of the weights of blocks of 64 tokens of the row weighed last, int64
            ``[ceil(V / 64)]``.
        total: Sum of all weights of that row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._offset, _ = rounding(weight_bits(width))
        self.sums = torch.zeros(-(-width // BLOCK), dtype=torch.int64)
        self.total = 0

    def weigh(self, logits: torch.Tensor, highest: float, lowest: float = -math.inf) -> int:
        """Weigh a row; returns the sum of the weights.

        Args:
            logits: float32 ``[V]``, none of them NaN or above the highest. They must stay as they
                are until the next row is weighed.
            highest: Highest logit; finite.
            lowest: Lowest logit that has a weight, a float32; -inf for none.
        """
        self._logits = logits.contiguous()
        self._weighing: Any = library(torch.float32).weighing_t(highest=highest, offset=self._offset, lowest=lowest)
        self.total = self._weigh(self._logits, self.sums, None)
        return self.total

    def weights(self) -> torch.Tensor:
        """int64 ``[V]``."""
        return self.part(0, self._width)

    def part(self, first: int, count: int) -> torch.Tensor:
        """Weights of `count` tokens from the id `first` on, fewer at the end, int64 ``[count]``."""
        logits = self._logits[first : first + count]
        weights = torch.empty(len(logits), dtype=torch.int64)
        self._weigh(logits, None, weights)
        return weights

    def token_at(self, point: int) -> int:
        """The token whose units include `point`, in ``range(total)``."""
        block, inside = find_unit(self.sums.numpy(), point)
        return block * BLOCK + find_unit(self.part(block * BLOCK, BLOCK).numpy(), inside)[0]

    def prefix(self, target: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The shortest prefix, by falling logit and rising id, of weight at least `target`.

        Args:
            target: Least weight of the prefix, from 1 to `total`.

        Returns:
            Rising ids of its tokens that have a weight, and their weights, int64 ``[n]``; in memory
            that the next prefix is written to.

        Raises:
            ValueError: `target` is not from 1 to `total`.
        """
        ids, keys, weights = self._buffers
        count = library(torch.float32).take_prefix(
            *(self._weighing, self._logits.data_ptr(), self._width, self.total, target),
            *(ids.data_ptr(), keys.data_ptr(), weights.data_ptr()),
        )
        if count < 0:
            raise ValueError(f"the target must be from 1 to the total {self.total}, got {target}")
        return ids[:count], weights[:count]

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Kept from row to row: the system would clear them again. What is not written costs
        nothing.
        """
        ids = torch.empty(self._width, dtype=torch.int64)
        keys = torch.empty(2 * self._width, dtype=torch.float32)
        return ids, keys, torch.empty(2 * self._width, dtype=torch.int64)

    def _weigh(self, logits: torch.Tensor, sums: torch.Tensor | None, weights: torch.Tensor | None) -> int:
        total: int = library(torch.float32).weigh(
            *(self._weighing, logits.data_ptr(), len(logits)),
            *(address(sums), address(weights)),
        )
        return total
