"""Temperature, min-p, top-k, top-p and the draw: one row of logits and one uniform number to one token.

Everything works row by row on ``[m, V]`` tensors with per-row parameters, and no result depends on the other rows:
sums are taken over integers, where order does not matter, or inside softmax, which reduces each row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WEIGHT_SCALE = 2.0**52
"""Probabilities become integer weights of this scale; a token less likely than 2**-52 is never drawn."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per-row parameters, each ``[m, 1]``; a tensor is None if no row uses it, and off values are neutral.

    Attributes:
        temperature: float64, above 0.
        min_p: float64; keep tokens at least this likely relative to the likeliest; off: 0.
        top_k: int64; keep the k highest logits, and ties with the lowest of them; off: V.
        top_p: float64; keep the shortest prefix, by falling probability and rising id, of at least this mass; off: 1.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None


def weigh(logits: torch.Tensor, truncation: Truncation) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution to draw from.

    Order: temperature, then min-p, then top-k, renormalised, then top-p.

    Args:
        logits: floating ``[m, V]``, at least one finite value per row and the rest finite or -inf.
        truncation: Per-row parameters.

    Returns:
        float64 logits after temperature with removed tokens at -inf, and int64 weights, both ``[m, V]``. A row of
        weights sums to about 2**52.
    """
    logits = logits.double()
    # the largest becomes 0, so that no temperature, however small, makes an infinity of it
    logits = (logits - logits.amax(-1, keepdim=True)) / truncation.temperature
    if truncation.min_p is not None:
        probabilities = logits.softmax(-1)
        floor = truncation.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, -torch.inf)
    if truncation.top_k is not None:
        logits = _keep_top_k(logits, truncation.top_k)
    weights = (logits.softmax(-1) * WEIGHT_SCALE).long()
    if truncation.top_p is not None:
        weights = _keep_top_p(weights, truncation.top_p)
    return logits.masked_fill(weights == 0, -torch.inf), weights


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution, in order of ids.

    Args:
        weights: int64 ``[m, V]``, at least 0.
        uniforms: float64 ``[m]`` in [0, 1].

    Returns:
        int64 ``[m]``: token ids.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = (uniforms[:, None] * total).long().minimum(total - 1)
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return ids.clamp_(max=weights.shape[-1] - 1)  # only for rows that are refused later


def _keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    width = logits.shape[-1]
    on = top_k < width
    largest = int(torch.where(on, top_k, 1).max())
    highest = logits.topk(largest, dim=-1).values
    lowest_kept = highest.gather(-1, (top_k - 1).clamp(max=largest - 1))
    return logits.masked_fill(on & (logits < lowest_kept), -torch.inf)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(-1)
    before = cumulative - ordered
    kept = before < top_p * cumulative[:, -1:]
    return torch.zeros_like(weights).scatter_(-1, ids, ordered * kept)
