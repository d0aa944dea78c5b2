"""Log probabilities of tokens, and their ranks, by the native kernels in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engines.embedded.native.libraries import address
from worker.engines.embedded.native.paths import library
from worker.engines.embedded.native.weights import are_available


def can_score(logits: torch.Tensor) -> bool:
    """Whether `score` takes these logits; gradients do not go through it."""
    fits = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)
    return fits and not logits.requires_grad and are_available()


def score(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    counts: Sequence[int],
    never: slice | torch.Tensor | None = None,
    divisors: torch.Tensor | None = None,
) -> tuple[list[float], list[int], list[list[tuple[int, float]]]]:
    """Log probability and rank of a token of each row, and those of the highest ones.

    The formula, in float64, is ``(logit - highest) - log(sum)``, and the sum of
    ``exp(logit - highest)`` is taken in one order, so that it has the same bits on every processor.

    Args:
        logits: float32 or float64 ``[R, V]`` on the CPU, not normalised.
        token_ids: The token of each row.
        counts: Number of the highest tokens of each row.
        never: Ids that have no rank, rising; a slice of them ends at V.
        divisors: float64 ``[R]``, above 0, of the logits; None for 1.

    Returns:
        Log probabilities ``[R]``, NaN where the highest logit is not finite; ranks ``[R]``, from 1,
        by falling logit and rising id; and for each row the ids and log probabilities of its
        highest tokens in that order, of which none is -inf.

    Raises:
        IndexError: there is no such token.
    """
    rows, width = logits.shape
    if not rows:
        return [], [], []
    if min(token_ids) < 0 or max(token_ids) >= width:  # which C would read beyond the row
        raise IndexError(f"tokens must be from 0 to {width - 1}, got {min(token_ids)} to {max(token_ids)}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ranked, unranked = width, torch.empty(0, dtype=torch.int64)
    if isinstance(never, slice):
        ranked = never.start
    elif never is not None:
        unranked = never.contiguous()
    most = min(max(counts), width)
    numbers = torch.tensor([[*token_ids], [min(count, most) for count in counts]], dtype=torch.int64)
    found = torch.empty(2, rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float64)
    top_ids, top_logprobs = torch.empty(rows, most, dtype=torch.int64), torch.empty(rows, most, dtype=torch.float64)
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
        tokens=numbers[0].data_ptr(),
        counts=numbers[1].data_ptr(),
        most=most,
        logprobs=logprobs.data_ptr(),
        ranks=found[0].data_ptr(),
        found=found[1].data_ptr(),
        top_ids=top_ids.data_ptr(),
        top_logprobs=top_logprobs.data_ptr(),
    )
    kernels.score_tokens(scoring, kernels.threads())
    ranks, lengths = found.tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in range(rows)]
    if most:
        pairs = zip(top_ids.tolist(), top_logprobs.tolist(), lengths, strict=True)
        tops = [list(zip(ids[:length], values[:length], strict=True)) for ids, values, length in pairs]
    return logprobs.tolist(), ranks, tops
