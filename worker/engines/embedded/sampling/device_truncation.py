"""Temperature, min-p, top-k, top-p and sampling on a device, sync-free.

The same tokens, bit for bit, as `truncation` finds on the CPU: the weights are integers, so that it
does not matter in which order a GPU adds them up. Every row is weighed whole; shapes depend on the
number of rows alone, which is padded to a few sizes, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adapters.devices import upload
from worker.engines.embedded.sampling.integer_weights import as_units, exponential_, points_in, share_of, weight_bits
from worker.engines.embedded.sampling.truncation import Controls

Select = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Where prefixes end: `select_by_sorting`, or a kernel that does the same."""

_STEP = 8


def padded(count: int) -> int:
    """Rows that a batch of `count` rows is filled up to: 1, 2, 4, and then multiples of 8."""
    return next((size for size in (1, 2, 4) if count <= size), -(-count // _STEP) * _STEP)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What each of P rows asks for, ``[P, 1]`` on a device; None where no row asks for it.

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
        """The columns of some rows' controls."""

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
        """Those of some of the rows."""
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
    numbers: torch.Tensor,
    select: Select,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row.

    Args:
        logits: float32 ``[P, V]``. A row with NaN or +inf, or with nothing but -inf, gets any
            token.
        highest: float32 ``[P, 1]``, of each row.
        columns: What the rows ask for.
        numbers: float64 ``[P, 1]``, in [0, 1).
        select: How prefixes are found.

    Returns:
        Tokens, int64 ``[P]``, and the weights that they were drawn from, int64 ``[P, V]``.
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
        tied = logits == last
        spent = before + (weights * tied).cumsum(-1) - weights
        weights.masked_fill_((logits < last) | (tied & (spent >= targets)), 0)
    cumulative = weights.cumsum(-1)
    points = points_in(cumulative[:, -1:], numbers)
    tokens = (cumulative <= points).sum(-1)
    return tokens.clamp_(max=logits.shape[1] - 1), weights


def select_by_sorting(
    keys: torch.Tensor, masses: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the shortest prefixes, by falling key, end that have a mass of at least `targets`.

    Args:
        keys: float32 ``[P, V]``. A row with NaN ends anywhere.
        masses: int64 ``[P, V]``, at least 0, with a sum below 2**62 in each row; 1 each if it is
            None.
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
