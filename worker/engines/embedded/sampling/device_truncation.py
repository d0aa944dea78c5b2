"""Temperature, min-p, top-k, top-p and sampling on a device, sync-free.

The same tokens, bit for bit, as `truncation` samples on the CPU: weights are integers, so the order
in which a GPU adds them does not matter. No value is read on the host. The weights of every row are
computed in full; shapes depend on the number of rows alone, which is padded to a few sizes, so that
a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adapters.devices import upload
from adapters.sampling.prefixes import Select, beyond_prefix
from adapters.sampling.truncation import log_of, lowest_kept
from adapters.sampling.weights import points_in, share_of, weigh
from worker.engines.embedded.sampling.truncation import Controls

_STEP = 8


def padded(count: int) -> int:
    """Number of rows that `count` rows are padded to: 1, 2, 4, then multiples of 8."""
    return next((size for size in (1, 2, 4) if count <= size), -(-count // _STEP) * _STEP)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Controls of P rows, ``[P, 1]`` each on a device; None where they are off in all rows.

    Attributes:
        divisor: float32; see `Controls.divisor`.
        log_min_p: float64, -inf where it is off.
        top_k: int64; the vocabulary's size where it is off.
        share: float64; see `Controls.share`.
    """

    divisor: torch.Tensor | None
    log_min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    share: torch.Tensor | None

    @classmethod
    def of(cls, controls: Sequence[Controls], vocab_size: int, device: torch.device) -> SamplingColumns:
        """Columns made from the controls of some rows."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return upload(torch.tensor(values, dtype=dtype)[:, None], device)

        ks = [min(one.top_k or vocab_size, vocab_size) for one in controls]
        return cls(
            column([one.divisor for one in controls], torch.float32)
            if any(one.divisor != 1 for one in controls)
            else None,
            column([log_of(one.min_p) for one in controls]) if any(one.min_p for one in controls) else None,
            column(ks, torch.int64) if min(ks) < vocab_size else None,
            column([one.share for one in controls]) if any(one.share < 1 for one in controls) else None,
        )

    def part(self, rows: slice) -> SamplingColumns:
        """The columns of a slice of the rows."""
        columns = (self.divisor, self.log_min_p, self.top_k, self.share)
        return SamplingColumns(*(None if one is None else one[rows] for one in columns))


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
    if columns.divisor is not None:
        logits, highest = logits / columns.divisor, highest / columns.divisor
    weights = weigh(logits, highest)
    if columns.log_min_p is not None:
        weights.masked_fill_(logits < lowest_kept(highest, columns.log_min_p), 0)
    if columns.top_k is not None:
        lowest, _ = select(logits, None, columns.top_k)
        weights.masked_fill_(logits < lowest, 0)
    if columns.share is not None:
        targets = share_of(weights.sum(-1, keepdim=True), columns.share)
        weights.masked_fill_(beyond_prefix(logits, weights, targets, select), 0)
    cumulative = weights.cumsum(-1)
    points = points_in(cumulative[:, -1:], uniforms)
    tokens = (cumulative <= points).sum(-1)
    return tokens.clamp_(max=logits.shape[1] - 1), weights
