"""Log probabilities of tokens, and their ranks, by the native kernels in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from worker.engines.embedded.native import weights
from worker.engines.embedded.native.libraries import address
from worker.engines.embedded.native.paths import library


class Score(NamedTuple):
    """The findings for a row.

    Attributes:
        logprob: Log probability of the token; NaN where the highest logit is not finite.
        rank: Rank of the token, from 1, by falling probability and rising id.
        top: Ids and log probabilities of the most likely tokens in that order, of which none is
            -inf.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Scores:
    """Memory for the scores of rows, which the kernels fill.

    Args:
        counts: Number of the most likely tokens that are wanted of each row; below 0 for nothing.
        width: V, of a row.

    Attributes:
        fields: ``SCORES`` of ``arguments.h``, which hold while this object does.
    """

    def __init__(self, counts: Sequence[int], width: int) -> None:
        rows, most = len(counts), max(0, min(max(counts, default=0), width))
        self._counts = torch.tensor([min(count, most) for count in counts], dtype=torch.int64)
        self._logprobs = torch.full((rows,), torch.nan, dtype=torch.float64)
        self._ranks, self._lengths = torch.ones(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        self._top_ids = torch.empty(rows, most, dtype=torch.int64)
        self._top_logprobs = torch.empty(rows, most, dtype=torch.float64)
        self.fields: dict[str, Any] = {
            "counts": self._counts.data_ptr(),
            "most": most,
            "logprobs": self._logprobs.data_ptr(),
            "ranks": self._ranks.data_ptr(),
            "found": self._lengths.data_ptr(),
            "top_ids": self._top_ids.data_ptr(),
            "top_logprobs": self._top_logprobs.data_ptr(),
        }

    def found(self) -> list[Score]:
        """The scores of each row."""
        values = zip(self._logprobs.tolist(), self._ranks.tolist(), strict=True)
        if not self._top_ids.shape[1]:
            return [Score(*one, []) for one in values]
        pairs = zip(self._top_ids.tolist(), self._top_logprobs.tolist(), self._lengths.tolist(), strict=True)
        tops = [list(zip(ids[:length], logprobs[:length], strict=True)) for ids, logprobs, length in pairs]
        return [Score(*one, top) for one, top in zip(values, tops, strict=True)]


def can_score(logits: torch.Tensor) -> bool:
    """Whether `score` takes these logits; gradients do not go through it."""
    fits = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)
    return fits and not logits.requires_grad and weights.are_available()


def score(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    counts: Sequence[int],
    never: slice | torch.Tensor | None = None,
    divisors: torch.Tensor | None = None,
) -> list[Score]:
    """Log probability and rank of a token of each row, and those of the highest ones.

    The formula, in float64, is ``(logit - highest) - log(sum)``, and the sum of
    ``exp(logit - highest)`` is taken in one order, so that it has the same bits on every processor.
    Logits decide on ranks.

    Args:
        logits: float32 or float64 ``[R, V]`` on the CPU, not normalised.
        token_ids: The token of each row.
        counts: Number of the highest tokens of each row.
        never: Ids that have no rank; a slice of them ends at V.
        divisors: float64 ``[R]``, above 0, of the logits; None for 1.

    Raises:
        IndexError: there is no such token.
        ValueError: there is not a token and a count for each row.
    """
    rows, width = logits.shape
    if len(token_ids) != rows or len(counts) != rows:  # C would read, and write, beyond them
        raise ValueError(f"{rows} rows need as many tokens and counts, got {len(token_ids)} and {len(counts)}")
    if not rows:
        return []
    if min(token_ids) < 0 or max(token_ids) >= width:
        raise IndexError(f"tokens must be from 0 to {width - 1}, got {min(token_ids)} to {max(token_ids)}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ranked, unranked = width, torch.empty(0, dtype=torch.int64)
    if isinstance(never, slice):
        ranked = never.indices(width)[0]
    elif never is not None and len(never):
        unranked = never.sort().values
        if unranked[0] < 0 or unranked[-1] >= width:
            raise IndexError(f"never must be from 0 to {width - 1}, got {int(unranked[0])} to {int(unranked[-1])}")
    tokens, scores = torch.tensor(token_ids, dtype=torch.int64), Scores(counts, width)
    kernels = library(torch.float32)
    scoring = kernels.scoring_t(
        logits=logits.data_ptr(),
        is_float64=logits.dtype == torch.float64,
        rows=rows,
        stride=logits.stride(0),
        width=width,
        divisors=address(divisors),
        ranked=ranked,
        never=unranked.data_ptr(),
        num_never=len(unranked),
        tokens=tokens.data_ptr(),
        **scores.fields,
    )
    kernels.score_tokens(scoring, kernels.threads())
    return scores.found()
