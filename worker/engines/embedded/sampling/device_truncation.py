"""Temperature, min-p, top-k, top-p and sampling on a device, sync-free.

The same tokens, bit for bit, as `truncation` samples on the CPU: weights are integers, so the order
in which a GPU adds them does not matter. No value is read on the host. The weights of every row are
computed in full; shapes depend on the number of rows alone, which is padded to a few sizes, so that
a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adapters.devices import upload
from worker.engines.embedded.sampling.integer_weights import as_units, exponential_, points_in, share_of, weight_bits
from worker.engines.embedded.sampling.truncation import Controls

Select = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Finds where prefixes end: `select_by_sorting`, or a kernel with the same results."""

_STEP = 8


def padded(count: int) -> int:
    """Number of rows that `count` rows are padded to: 1, 2, 4, then multiples of 8."""
    return next((size for size in (1, 2, 4) if count <= size), -(-count // _STEP) * _STEP)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Controls of P rows, ``[P, 1]`` each on a device; None where they are off in all rows.

    Attributes:
        temperature: float64.
        depth: float64; see `Controls.min_p_depth`.
        top_k: int64; the vocabulary's size where it is off.
        top_p: float64; 1 where it is off.
    """

    temperature: torch.Tensor
    depth: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def of(cls, controls: Sequence[Controls], vocab_size: int, device: torch.device) -> SamplingColumns:
        """From the controls of some rows."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return upload(torch.tensor(values, dtype=dtype)[:, None], device)

        ks = [min(one.top_k or vocab_size, vocab_size) for one in controls]
        return cls(
            column([one.temperature for one in controls]),
            column([one.min_p_depth for one in controls]) if any(one.min_p for one in controls) else None,
            column(ks, torch.int64) if min(ks) < vocab_size else None,
            column([one.top_p for one in controls]) if any(one.top_p < 1 for one in controls) else None,
        )

    def part(self, rows: slice) -> SamplingColumns:
        """The columns of a slice of the rows."""
        return SamplingColumns(
            self.temperature[rows],
            None if self.depth is None else self.depth[rows],
            None if self.top_k is None else self.top_k[rows],
            None if self.top_p is None else self.top_p[rows],
        )


def truncate_and_sample_rows(
    logits: torch.Tensor,
    highest: torch.Tensor,
    columns: SamplingColumns,
    uniforms: torch.Tensor,
    select: Select,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each row.

    Args:
        logits: float32 ``[P, V]``. A row with NaN or +inf, or with nothing but -inf, gets any
            token.
        highest: float32 ``[P, 1]``, of each row.
        columns: Controls of the rows.
        uniforms: Random numbers, float64 ``[P, 1]``, in [0, 1).
        select: Finds where prefixes end.

    Returns:
        Tokens, int64 ``[P]``, and the weights that they were sampled from, int64 ``[P, V]``.
    """
    below = logits.double() - highest.double()
    weights = as_units(exponential_(below / columns.temperature), weight_bits(logits.shape[1]))
    if columns.depth is not None:
        weights.masked_fill_(below < columns.depth, 0)
    if columns.top_k is not None:
        lowest, _ = select(logits, None, columns.top_k)
        weights.masked_fill_(logits < lowest, 0)
    if columns.top_p is not None:
        targets = share_of(weights.sum(-1, keepdim=True), columns.top_p)
        last, before = select(logits, weights, targets)
        # of the tokens that tie with the last key, the lower ids are kept until the target is met
        tied = logits == last
        spent = before + (weights * tied).cumsum(-1) - weights
        weights.masked_fill_((logits < last) | (tied & (spent >= targets)), 0)
    cumulative = weights.cumsum(-1)
    points = points_in(cumulative[:, -1:], uniforms)
    tokens = (cumulative <= points).sum(-1)
    return tokens.clamp_(max=logits.shape[1] - 1), weights


def select_by_sorting(
    keys: torch.Tensor, masses: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the shortest prefixes, by falling key, of mass at least `targets` end.

    Args:
        keys: float32 ``[P, V]``. A row with NaN ends anywhere.
        masses: int64 ``[P, V]``, at least 0, row sums below 2**62; 1 each if None.
        targets: int64 ``[P, 1]``, from 1 to the sum.

    Returns:
        The key of the last token, float32 ``[P, 1]``, and the mass of all tokens with higher keys,
        int64 ``[P, 1]``.
    """
    ordered, order = torch.sort(keys, dim=-1, descending=True)
    if masses is None:
        last = ordered.gather(1, targets - 1)
        return last, (keys > last).sum(-1, keepdim=True)
    reached = masses.gather(1, order).cumsum_(-1)
    ends = (reached < targets).sum(-1, keepdim=True).clamp_(max=keys.shape[1] - 1)
    last = ordered.gather(1, ends)
    return last, (masses * (keys > last)).sum(-1, keepdim=True)
