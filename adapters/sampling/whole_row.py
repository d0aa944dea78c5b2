"""Reductions of whole rows of logits on the CPU: their blocks' maxima, and the weights of a row.

Native kernels (`adapters.row_kernels`) compute them, or torch without those. Both have the same
results, but for the last bits of exp. Which one computes holds for the process, as for
`weights.exponential_`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from adapters.row_kernels import WholeRow, native_kernels
from adapters.sampling import candidates
from adapters.sampling.candidates import BLOCK, num_blocks
from adapters.sampling.prefixes import prefix_of_mass
from adapters.sampling.weights import exponential_, rounding, weight_bits

_NARROW = 8192
"""Up to this width numpy's argmax is faster than one by block maxima."""


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """`candidates.block_maxima` of float32 `logits` ``[R, V]``."""
    kernels = native_kernels() if logits.device.type == "cpu" else None
    return candidates.block_maxima(logits) if kernels is None else kernels.block_maxima(logits)


def is_searched_fast(width: int) -> bool:
    """Whether `find_highest` in rows of this width is faster than a search by blocks' maxima."""
    return native_kernels() is not None or width <= _NARROW


def find_highest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """The lowest id that has the highest logit of each row of `logits` ``[R, V]`` on the CPU, and
    that logit; NaN where a row holds NaN.
    """
    kernels = native_kernels()
    if kernels is not None:
        return kernels.highest_ids(logits)
    rows = logits.numpy()  # torch's argmax wakes a second thread, which takes longer than the search
    ids: list[int] = rows.argmax(-1).tolist()  # the first NaN of a row that has one
    return ids, [float(row[token]) for row, token in zip(rows, ids, strict=True)]


def whole_row(vocab_size: int) -> WholeRow:
    """Weighs rows of `vocab_size` logits."""
    kernels = native_kernels()
    return TorchRow(vocab_size) if kernels is None else kernels.weigher(vocab_size)


class TorchRow:
    """Weights by torch and numpy, in one buffer: allocating per row would cost more.

    Args:
        vocab_size: Width of a row.
    """

    def __init__(self, vocab_size: int) -> None:
        offset, self._zero = rounding(weight_bits(vocab_size))
        self._offset = offset
        self._zero_of_block = _wrapped(BLOCK * self._zero)
        # Padded to whole blocks with weights of 0. The bits of a float are the weight plus `_zero`
        # (`weights.rounding`), so that sums of integers need one subtraction per block.
        self._all = torch.full((num_blocks(vocab_size) * BLOCK,), offset, dtype=torch.float64)
        self._floats = self._all[:vocab_size]
        self._integers = self._floats.view(torch.int64)
        self.total = 0

    def weigh(self, logits: torch.Tensor, highest: float, lowest: float = -math.inf) -> int:
        self._logits = logits
        floats = self._floats
        floats.copy_(logits).sub_(highest)
        exponential_(floats)
        if lowest > -math.inf:
            floats.mul_(logits >= lowest)
        floats.add_(self._offset)
        self._sums = self._all.view(torch.int64).view(-1, BLOCK).sum(-1).sub_(self._zero_of_block)
        self.total = int(self._sums.sum())
        return self.total

    def weights(self) -> torch.Tensor:
        return self._integers - self._zero

    def prefix(self, target: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        return prefix_of_mass(self._logits, self._integers, self.total, target, self._zero)

    def token_at(self, point: int) -> int:
        block, inside = find_unit(self._sums.numpy(), point)
        bits = self._all.numpy()[block * BLOCK : (block + 1) * BLOCK].view(np.int64)
        return block * BLOCK + find_unit(bits - self._zero, inside)[0]


def find_unit(masses: np.ndarray[Any, np.dtype[np.int64]], point: int) -> tuple[int, int]:
    """The index of the int64 mass that includes the unit `point` of their sum; its unit within."""
    cumulative = masses.cumsum()
    index = int(cumulative.searchsorted(point, "right"))
    return index, point - (int(cumulative[index - 1]) if index else 0)


def _wrapped(value: int) -> int:
    """`value` wrapped to a signed int64."""
    return (value + 2**63) % 2**64 - 2**63
