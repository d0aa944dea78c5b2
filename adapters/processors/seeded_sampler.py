"""The sampler as the last processor of a chain, for engines whose seeds are not exact."""

from __future__ import annotations

import torch

from adapters.contract import SAMPLE, ProcessorArgs, Reads, ShapingProcessor, Stage, uniform
from adapters.sampling.weights import point_in_one, weights_of


class SeededSampler(ShapingProcessor):
    """Leaves one token: the argmax, or the one sampled with this request's seed.

    The embedded engine's sample: the cumulative integer weights (`adapters.sampling.weights`) in
    the order of the ids, at a uniform number that depends on seed, choice and position alone
    (`adapters.contract.random_numbers`).
    Temperature and truncation precede it in the chain. No request can name it.

    A row that holds NaN or +inf is left as it is: who checks it finds that.

    Args:
        seed: Seed of the request, uint64; None is greedy, ties to the lowest id.
        choice: Index of the choice.
    """

    name = "seeded_sampler"
    stage = Stage.SAMPLING
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, seed: int | None, choice: int = 0) -> None:
        self._seed = seed
        self._choice = choice

    def shape(self, logits: torch.Tensor) -> None:
        if not bool(logits.max().isfinite()):
            return
        token_id = _argmax(logits) if self._seed is None else self._sampled(logits, self._seed)
        value = logits[token_id].clone()
        logits.fill_(-torch.inf)
        logits[token_id] = value

    def _sampled(self, logits: torch.Tensor, seed: int) -> int:
        cumulative = weights_of(logits[None])[0].cumsum(-1)
        total = int(cumulative[-1])
        point = point_in_one(total, uniform(seed, self._choice, self.position, SAMPLE))
        return int(torch.searchsorted(cumulative, point, right=True))


def _argmax(logits: torch.Tensor) -> int:
    """The lowest id of the highest logit."""
    return int((logits == logits.max()).nonzero()[0, 0])
