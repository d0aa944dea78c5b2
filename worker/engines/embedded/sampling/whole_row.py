"""What reads whole rows of logits on the CPU: their blocks' maxima, and the weights of a row.

By the native kernels, or by torch without them.

Both have the same results, but for the last bits of exp. Which one computes holds for the process,
as for `integer_weights.exponential_`.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from adapters import candidates
from adapters.candidates import BLOCK, num_blocks, prefix_of_mass
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.sampling.integer_weights import exponential_, rounding, weight_bits

_NARROW = 8192
"""Up to this width numpy's argmax is faster than one by block maxima."""


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """`adapters.candidates.block_maxima` of float32 `logits` ``[R, V]`` on the CPU."""
    if native_weights.are_available():
        return native_weights.block_maxima(logits)
    return candidates.block_maxima(logits)


def is_searched_fast(width: int) -> bool:
    """Whether `find_highest` in rows of this width is faster than a search by blocks' maxima."""
    return native_weights.are_available() or width <= _NARROW


def find_highest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """The lowest id that has the highest logit of each row of `logits` ``[R, V]`` on the CPU, and
    that logit; NaN where a row holds NaN.
    """
    if native_weights.are_available():
        return native_weights.highest_ids(logits)
    rows = logits.numpy()  # torch's argmax wakes a second thread, which takes longer than the search
    ids: list[int] = rows.argmax(-1).tolist()  # the first NaN of a row that has one
    return ids, [float(row[token]) for row, token in zip(rows, ids, strict=True)]


class WholeRow(Protocol):
    """Weights of one row at a time; all but `weigh` is of the row weighed last."""

    @property
    def total(self) -> int:
        """Weight of the row weighed last."""

    def weigh(self, logits: torch.Tensor, highest: float, temperature: float, depth: float, lowest: float) -> int:
        """Weigh a row; returns the sum.

        Args:
            logits: float32 ``[V]``, finite or -inf.
            highest: Of them; finite.
            temperature: Above 0.
            depth: Lowest logit that has a weight, relative to the highest; -inf if off.
            lowest: Lowest logit that has a weight; -inf if off.
        """

    def weights(self) -> torch.Tensor:
        """int64 ``[V]``."""

    def prefix(self, target: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The shortest prefix, by falling logit and rising id, of weight at least `target`.

        Args:
            target: From 1 to `total`.

        Returns:
            Rising ids that include the whole prefix (None: all ids), and their weights, int64, with
            0 for ids outside the prefix; both hold until the next prefix.
        """

    def token_at(self, point: int) -> int:
        """The token whose units include `point`, in ``range(total)``."""


def whole_row(vocab_size: int) -> WholeRow:
    """Weighs rows of `vocab_size` logits."""
    return NativeRow(vocab_size) if native_weights.are_available() else TorchRow(vocab_size)


class NativeRow:
    """By the native kernels: a row is read once for the sums of its blocks; no weight is kept.

    Args:
        vocab_size: Width of a row.
    """

    def __init__(self, vocab_size: int) -> None:
        self._offset, _ = rounding(weight_bits(vocab_size))
        self._width = vocab_size
        self._row = native_weights.RowWeights(vocab_size)

    @property
    def total(self) -> int:
        return self._row.total

    def weigh(self, logits: torch.Tensor, highest: float, temperature: float, depth: float, lowest: float) -> int:
        weighing = native_weights.Weighing(highest, temperature, depth, self._offset, lowest)
        return self._row.weigh(logits.contiguous(), weighing)

    def weights(self) -> torch.Tensor:
        return self._row.part(0, self._width)

    def prefix(self, target: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        return self._row.prefix(target)

    def token_at(self, point: int) -> int:
        block, inside = _find(self._row.sums.numpy(), point)
        return block * BLOCK + _find(self._row.part(block * BLOCK, BLOCK).numpy(), inside)[0]


class TorchRow:
    """By torch and numpy, in one buffer: allocating per row would cost more.

    Args:
        vocab_size: Width of a row.
    """

    def __init__(self, vocab_size: int) -> None:
        offset, self._zero = rounding(weight_bits(vocab_size))
        self._offset = offset
        self._zero_of_block = _wrapped(BLOCK * self._zero)
        # Padded to whole blocks with weights of 0. The bits of a float are the weight plus `_zero`
        # (`integer_weights.rounding`), so that sums of integers need one subtraction per block.
        self._all = torch.full((num_blocks(vocab_size) * BLOCK,), offset, dtype=torch.float64)
        self._floats = self._all[:vocab_size]
        self._integers = self._floats.view(torch.int64)
        self.total = 0

    def weigh(self, logits: torch.Tensor, highest: float, temperature: float, depth: float, lowest: float) -> int:
        self._logits = logits
        floats = self._floats
        floats.copy_(logits).sub_(highest)
        kept = None if lowest == -math.inf else logits >= lowest
        if depth > -math.inf:
            near = floats >= depth
            kept = near if kept is None else kept & near
        if temperature != 1:
            floats.div_(temperature)
        exponential_(floats)
        if kept is not None:
            floats.mul_(kept)
        floats.add_(self._offset)
        self._sums = self._all.view(torch.int64).view(-1, BLOCK).sum(-1).sub_(self._zero_of_block)
        self.total = int(self._sums.sum())
        return self.total

    def weights(self) -> torch.Tensor:
        return self._integers - self._zero

    def prefix(self, target: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        return prefix_of_mass(self._logits, self._integers, self.total, target, self._zero)

    def token_at(self, point: int) -> int:
        block, inside = _find(self._sums.numpy(), point)
        bits = self._all.numpy()[block * BLOCK : (block + 1) * BLOCK].view(np.int64)
        return block * BLOCK + _find(bits - self._zero, inside)[0]


def _find(masses: np.ndarray, point: int) -> tuple[int, int]:
    """The index of the int64 mass that includes the unit `point` of their sum; its unit within."""
    cumulative = masses.cumsum()
    index = int(cumulative.searchsorted(point, "right"))
    return index, point - (int(cumulative[index - 1]) if index else 0)


def _wrapped(value: int) -> int:
    """`value` wrapped to a signed int64."""
    return (value + 2**63) % 2**64 - 2**63
