"""Log probabilities of sampled tokens and of the top-n alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from worker.engines import TokenLogprob
from worker.engines.embedded.plan import Samples


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[list[TokenLogprob]]:
    """The sampled token, then the top-n, for each row.

    Ranks are 1-based, by falling probability, ties by rising id. The top-n excludes masked tokens.

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
    rows = zip(token_ids, chosen[:, 0].tolist(), (ahead.sum(-1) + 1).tolist(), strict=True)
    tops = _tops(logprobs, counts) if max(counts) else [[]] * len(token_ids)
    return [[TokenLogprob(*row), *top] for row, top in zip(rows, tops, strict=True)]


def _tops(logprobs: torch.Tensor, counts: Sequence[int]) -> list[list[TokenLogprob]]:
    # one more than wanted, to detect a tie with the last value, of which `topk` takes any
    all_values, all_ids = (each.tolist() for each in logprobs.topk(min(max(counts) + 1, logprobs.shape[-1])))
    tops = []
    for row, (count, values, ids) in enumerate(zip(counts, all_values, all_ids, strict=True)):
        if 0 < count < len(values) and values[count - 1] == values[-1]:
            ids = (logprobs[row] >= values[-1]).nonzero()[:, 0].tolist()
            values = logprobs[row, ids].tolist()
        best = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:count]
        ranked = enumerate(best, start=1)
        tops.append([TokenLogprob(token, value, rank) for rank, (value, token) in ranked if value > -math.inf])
    return tops


def attach(
    samples: Samples, rows: Sequence[int], found: Sequence[list[TokenLogprob]], attributed: frozenset[int]
) -> None:
    """Write what `token_logprobs` found for `rows` into `samples`."""
    for row, one in zip(rows, found, strict=True):
        if row in attributed:
            samples.processed[row] = one[0].logprob
        else:
            samples.logprobs[row] = one
