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
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    sampled = torch.tensor(token_ids, device=logits.device)[:, None]
    ranks = (ids == sampled).int().argmax(-1).tolist()
    chosen = logprobs.gather(-1, sampled)[:, 0].tolist()
    most = max(counts)
    top_values, top_ids = values[:, :most].tolist(), ids[:, :most].tolist()
    answers = []
    for row, token in enumerate(token_ids):
        entries = [TokenLogprob(token, chosen[row], ranks[row] + 1)]
        top = zip(top_ids[row][: counts[row]], top_values[row], strict=False)
        entries += [
            TokenLogprob(other, value, rank) for rank, (other, value) in enumerate(top, start=1) if value > -math.inf
        ]
        answers.append(entries)
    return answers
