"""Log probabilities of sampled tokens and of their likeliest rivals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from worker.engines import TokenLogprob


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[list[TokenLogprob]]:
    """The sampled token, then the top-n, for each row.

    Ranks are 1-based, by falling probability and then rising id. Tokens that cannot occur are not in the top-n.

    Args:
        logits: floating ``[m, V]``, not normalised.
        token_ids: Sampled id of each row.
        counts: n of each row's top-n.
    """
    logprobs = logits.double().log_softmax(-1)
    sampled = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logprobs.gather(-1, sampled)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logprobs > chosen) | ((logprobs == chosen) & (ids < sampled))
    ranks = (ahead.sum(-1) + 1).tolist()
    values = chosen[:, 0].tolist()
    tops = _tops(logprobs, counts) if max(counts) else [[]] * len(counts)
    return [[TokenLogprob(token_ids[row], values[row], ranks[row]), *top] for row, top in enumerate(tops)]


def _tops(logprobs: torch.Tensor, counts: Sequence[int]) -> list[list[TokenLogprob]]:
    # one more than asked for, to see whether `topk`, which takes any of equal values, had a choice
    found = logprobs.topk(min(max(counts) + 1, logprobs.shape[-1]))
    tops = []
    for row, (count, values, ids) in enumerate(zip(counts, found.values.tolist(), found.indices.tolist(), strict=True)):
        if 0 < count < len(values) and values[count - 1] == values[-1]:
            ids = (logprobs[row] >= values[-1]).nonzero()[:, 0].tolist()
            values = logprobs[row, ids].tolist()
        best = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:count]
        ranked = enumerate(best, start=1)
        tops.append([TokenLogprob(token, value, rank) for rank, (value, token) in ranked if value > -math.inf])
    return tops
