"""Log probabilities of sampled tokens and of the top-n alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from worker.engines import TokenLogprob
from worker.engines.embedded.host import HostCopy
from worker.engines.embedded.plan import Samples


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[list[TokenLogprob]]:
    """The sampled token, then the top-n, for each row.

    Ranks are 1-based, by falling probability, ties by rising id. The top-n excludes masked tokens.

    Args:
        logits: floating ``[m, V]``, not normalised.
        token_ids: Sampled id of each row.
        counts: n of each row's top-n.
    """
    return Logprobs(logits, torch.tensor(token_ids, device=logits.device), counts).read()


def attach(
    samples: Samples, rows: Sequence[int], found: Sequence[list[TokenLogprob]], attributed: frozenset[int]
) -> None:
    """Write what `token_logprobs` found for `rows` into `samples`."""
    for row, one in zip(rows, found, strict=True):
        if row in attributed:
            samples.processed[row] = one[0].logprob
        else:
            samples.logprobs[row] = one


class Logprobs:
    """Same as `token_logprobs`, in two steps of which the constructor is sync-free.

    Args:
        logits: floating ``[m, V]``, not normalised.
        token_ids: int64 ``[m]``, on the device of `logits`.
        counts: n of each row's top-n.
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> None:
        self._counts = counts
        self._logprobs = logits.double().log_softmax(-1)
        sampled = token_ids[:, None]
        chosen = self._logprobs.gather(-1, sampled)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        ahead = (self._logprobs > chosen) | ((self._logprobs == chosen) & (ids < sampled))
        found = [token_ids, chosen[:, 0], ahead.sum(-1) + 1]
        if max(counts):
            # one more than wanted, to detect a tie with the last value, of which `topk` takes any
            found += self._logprobs.topk(min(max(counts) + 1, logits.shape[-1]))
        self._copy = HostCopy(*found)

    def read(self) -> list[list[TokenLogprob]]:
        """The result of `token_logprobs`; synchronises with the device."""
        token_ids, values, ranks, *found = (one.tolist() for one in self._copy.wait())
        tops = self._tops(*found) if found else [[]] * len(token_ids)
        return [[TokenLogprob(token_ids[row], values[row], ranks[row]), *top] for row, top in enumerate(tops)]

    def _tops(self, all_values: list[list[float]], all_ids: list[list[int]]) -> list[list[TokenLogprob]]:
        tops = []
        for row, (count, values, ids) in enumerate(zip(self._counts, all_values, all_ids, strict=True)):
            if 0 < count < len(values) and values[count - 1] == values[-1]:
                ids = (self._logprobs[row] >= values[-1]).nonzero()[:, 0].tolist()
                values = self._logprobs[row, ids].tolist()
            best = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:count]
            ranked = enumerate(best, start=1)
            tops.append([TokenLogprob(token, value, rank) for rank, (value, token) in ranked if value > -math.inf])
        return tops
