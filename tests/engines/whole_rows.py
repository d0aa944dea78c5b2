"""The sampler as the rules say it, a whole row at a time: no candidates, no guesses, no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.sampling.prefixes import beyond_prefix
from adapters.sampling.truncation import log_of, lowest_kept
from adapters.sampling.weights import points_in, share_of, weigh
from worker.engines.embedded.sampling.truncation import Controls


def sample_whole_rows(
    logits: torch.Tensor, controls: Sequence[Controls], uniforms: Sequence[float]
) -> tuple[list[int], torch.Tensor]:
    """Tokens of float32 ``[R, V]``, and the weights that they come from, int64 ``[R, V]``."""
    tokens, found = [], []
    for row, one, uniform in zip(logits, controls, uniforms, strict=True):
        values = row[None] / torch.tensor(one.divisor, dtype=torch.float32)
        highest = values.amax(-1, keepdim=True)
        weights = weigh(values, highest, len(row))
        if one.min_p:
            lowest = lowest_kept(highest, torch.tensor([[log_of(one.min_p)]], dtype=torch.float64))
            weights[values < lowest] = 0
        if 0 < one.top_k < len(row):
            weights[values < values.sort(descending=True).values[:, one.top_k - 1]] = 0
        if one.share < 1:
            targets = share_of(weights.sum(-1, keepdim=True), torch.tensor([[one.share]], dtype=torch.float64))
            weights[beyond_prefix(values, weights, targets)] = 0
        cumulative = weights.cumsum(-1)
        points = points_in(cumulative[:, -1:], torch.tensor([[uniform]], dtype=torch.float64))
        tokens.append(int((cumulative <= points).sum()))
        found.append(weights[0])
    return tokens, torch.stack(found)
