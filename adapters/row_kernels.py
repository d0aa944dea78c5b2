"""Native kernels for rows of logits that an engine passes in: faster, with the same results.

Nothing here imports an engine, so that one that brings kernels calls `use_kernels`
when it is imported. They hold for the process: processors, pipes and samplers of one
process compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch


class WholeRow(Protocol):
    """Weights of one row at a time; all but `weigh` is about the row weighed last."""

    @property
    def total(self) -> int:
        """Weight of the row weighed last."""

    def weigh(self, logits: torch.Tensor, highest: float, lowest: float = -math.inf) -> int:
        """Weigh a row; returns the sum.

        Args:
            logits: float32 ``[V]``, finite or -inf, divided by the temperature. They must stay as
                they are until the next row is weighed.
            highest: Highest of them; finite.
            lowest: Lowest logit that has a weight, a float32; -inf if off.
        """

    def weights(self) -> torch.Tensor:
        """int64 ``[V]``."""

    def prefix(self, target: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The shortest prefix, by falling logit and rising id, of weight at least `target`.

        Args:
            target: Weight from 1 to `total`.

        Returns:
            Rising ids that include the whole prefix (None: all ids), and their weights, int64, with
            0 for ids outside the prefix; both hold until the next prefix.
        """

    def token_at(self, point: int) -> int:
        """The token whose units include `point`, in ``range(total)``."""


class RowKernels(Protocol):
    """Kernels for float32 rows on the CPU; a module that has these functions is one."""

    def are_available(self) -> bool:
        """Whether they compute here; asked at each use."""

    def exponential_(self, values: torch.Tensor) -> torch.Tensor:
        """See `weights.exponential_`."""

    def apply_masks(self, logits: torch.Tensor, rows: Sequence[int], bitmasks: Sequence[torch.Tensor]) -> None:
        """Mask with -inf every logit whose bit is 0, see `adapters.contract.apply_bitmask`.

        Args:
            logits: float32 ``[B, V]`` that `kernels_for` are for, edited in place.
            rows: Rows that are masked, none of them twice.
            bitmasks: int32 ``[W]`` for each of them, on the CPU; ids beyond ``32 * W`` are masked.
        """

    def block_maxima(self, logits: torch.Tensor) -> torch.Tensor:
        """See `candidates.block_maxima`."""

    def highest_ids(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """See `whole_row.find_highest`."""

    def weigher(self, vocab_size: int) -> WholeRow:
        """Weighs rows of `vocab_size` logits."""


_kernels: RowKernels | None = None


def use_kernels(kernels: RowKernels) -> None:
    """Compute with `kernels` from now on, wherever they are available."""
    global _kernels
    _kernels = kernels


def native_kernels() -> RowKernels | None:
    """The kernels that were passed in, None if there are none or they do not compute here."""
    return _kernels if _kernels is not None and _kernels.are_available() else None


def kernels_for(logits: torch.Tensor) -> RowKernels | None:
    """`native_kernels` that compute on these logits where they are, None if they do not."""
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    return native_kernels() if fits else None
