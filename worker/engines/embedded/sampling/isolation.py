"""Isolation: where sampling raises, which only a defect makes it do, one request alone ends."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from worker.engines.embedded.plan import Edits, Plan, Request, Samples
from worker.engines.embedded.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class NotSampled(Exception):
    """Sampling the rows of a step raised; it may have edited any of their logits."""


class IsolatingSampler:
    """A `Sampler` that samples rows one by one while a request lives whose step it failed in.

    A row's token does not depend on the other rows, so that those answers stay as they were.

    Args:
        vocab_size, undecodable_ids: See `Sampler`.
    """

    def __init__(self, vocab_size: int, undecodable_ids: tuple[int, ...]) -> None:
        self._sampler = Sampler(vocab_size, undecodable_ids)
        self._suspects: set[str] = set()

    def sample(self, logits: torch.Tensor, edits: Edits, plan: Plan) -> Samples:
        """Tokens for ``plan.sampled``, one row each; see `Sampler.sample`.

        Raises:
            NotSampled: it failed, and no suspect was known.
        """
        if self._suspects:
            return self._sample_each(logits, edits, plan)
        try:
            return self._sampler.sample(logits, edits, plan)
        except Exception as error:
            raise NotSampled(f"{type(error).__name__}: {error}") from error

    def force(self, edits: Edits, count: int) -> Samples:
        """See `Sampler.force`."""
        return self._sampler.force(edits, count)

    def suspect(self, requests: Iterable[Request]) -> None:
        """Sample row by row until `forget` has been told of all these requests."""
        self._suspects.update(request.id for request in requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Take requests that have ended out of the suspects."""
        self._suspects.difference_update(request_ids)

    def _sample_each(self, logits: torch.Tensor, edits: Edits, plan: Plan) -> Samples:
        samples = Samples([0] * len(plan.sampled))
        for row, request in enumerate(plan.sampled):
            try:
                one = self._sampler.sample(logits[row : row + 1], edits.of([row]), Plan((), (), (request,)))
            except Exception as error:  # the request's boundary: the rest of the step is other requests'
                logger.exception("request %s: its token at %d could not be sampled", request.id, len(request.tokens))
                samples.errors[row] = f"its token could not be sampled: {type(error).__name__}: {error}"
                continue
            samples.put([row], one)
        return samples
