"""Stochastic and stateful truncation: XTC and mirostat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import Field

from adapters.contract import Context, ProcessorArgs, Reads, ShapingProcessor, Stage, uniform
from adapters.sampling.truncation import column, lowest_kept, total_weights

XTC = 1
"""Purpose of `Xtc`'s random numbers (`adapters.contract.random_numbers`)."""


class Xtc(ShapingProcessor):
    """Excludes the top choices at random: of the tokens above a threshold the least likely stays.

    Source: "Exclude Top Choices" (p-e-w, text-generation-webui pull request 6335; llama.cpp,
    `xtc`). At each position, with the given probability: if two or more tokens have p >= threshold,
    all of them but the least likely are dropped. Tokens that tie for the least likely are all kept.
    No token is protected, end tokens included. The random number depends on the request's seed, the
    choice and the absolute position only. A threshold above 0.5 never drops any.
    """

    name = "xtc"
    version = 2  # weights are integers
    stage = Stage.TRUNCATION
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        threshold: float = Field(default=0.1, ge=0.0, le=1.0, description="Least probability of a top choice.")
        probability: float = Field(
            ge=0.0, le=1.0, description="Share of the steps at which the top choices are excluded."
        )

    def __init__(self, args: Args, context: Context) -> None:
        self.threshold = args.threshold
        self.probability = args.probability
        self.seed, self.choice = context.seed, context.choice

    @property
    def excludes(self) -> bool:
        """Whether the random number at `position` excludes the top choices."""
        return uniform(self.seed, self.choice, self.position, XTC) < self.probability

    def shape(self, logits: torch.Tensor) -> None:
        self.shape_rows([self], logits.unsqueeze(0))

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        rows = [row for row, processor in enumerate(processors) if processor.excludes]
        if not rows:
            return
        part = logits[rows]
        thresholds = column([processors[row].threshold for row in rows], part, torch.float64)
        log_ratios = (thresholds * total_weights(part)).log_()
        choice = (part >= lowest_kept(part.amax(-1, keepdim=True), log_ratios)) & (part > -torch.inf)
        least = part.masked_fill(~choice, torch.inf).amin(-1, keepdim=True)
        logits[rows] = part.masked_fill(choice & (part > least), -torch.inf)


class Mirostat(ShapingProcessor):
    """Steers the surprisal of the chosen tokens towards tau (mirostat 2.0).

    Source: Basu et al., arXiv 2007.14966, algorithm 2, and llama.cpp's `mirostat_v2`. The surprisal
    of a token is -log2 p. Tokens with a surprisal above mu are dropped, the most likely ones never;
    after a token with surprisal s among what was kept, renormalised, mu becomes mu - eta * (s -
    tau). mu begins at 2 * tau.

    Forced tokens, and tokens that this processor had dropped, leave mu unchanged. s is not
    renormalised for tokens that later processors drop. The state depends on logits: a continuation
    replays on them (`adapters.chain.batch.replay`).
    """

    name = "mirostat"
    stage = Stage.TRUNCATION
    reads = Reads.GENERATED
    observes_logits = True

    class Args(ProcessorArgs):
        tau: float = Field(default=5.0, ge=0.0, le=100.0, description="Surprisal to aim for, in bits per token.")
        eta: float = Field(default=0.1, ge=0.0, le=1.0, description="Learning rate of mu.")

    def __init__(self, args: Args, context: Context) -> None:
        self.tau, self.eta = args.tau, args.eta
        self._mus = [2.0 * args.tau]  # before generated token 0, 1, ...
        self._observed = (-1, 0)  # `num_generated` and `num_outside` where `_surprisals` is about the next token
        self._surprisals: torch.Tensor | None = None

    @property
    def mu(self) -> float:
        """Highest surprisal of a token at `position`, in bits."""
        return self._mus[-1]

    def reset(self) -> None:
        del self._mus[1:]
        self._surprisals = None

    def advance(self, token_id: int, index: int) -> None:
        mu = self._mus[-1]
        if self._surprisals is not None and self._observed == (index, self.num_outside):
            surprisal = float(self._surprisals[token_id])
            if math.isfinite(surprisal):
                mu -= self.eta * (surprisal - self.tau)
        self._mus.append(mu)

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        del self._mus[len(self._mus) - len(token_ids) :]
        if self._observed[0] >= len(self._mus):  # it belonged to a discarded history
            self._surprisals = None
        return True

    def shape(self, logits: torch.Tensor) -> None:
        self.shape_rows([self], logits.unsqueeze(0))

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        mus = torch.tensor([processor.mu for processor in processors], dtype=logits.dtype).unsqueeze(1)
        surprisals = _surprisals(logits)
        unlikely = (surprisals > mus.to(logits.device, non_blocking=True)) & (logits < logits.amax(-1, keepdim=True))
        logits.masked_fill_(unlikely, -torch.inf)
        for processor, row in zip(processors, _surprisals(logits), strict=True):
            processor._observed, processor._surprisals = (processor.num_generated, processor.num_outside), row

    def __getstate__(self) -> dict[str, Any]:
        """The state with a copy of the observed row instead of a view of its batch."""
        state = dict(vars(self))
        if self._surprisals is not None:
            state["_surprisals"] = self._surprisals.clone()
        return state


def _surprisals(logits: torch.Tensor) -> torch.Tensor:
    """-log2 of the probabilities, ``[R, V]``; +inf for masked tokens."""
    return logits.log_softmax(-1).mul_(-1.0 / math.log(2.0))
