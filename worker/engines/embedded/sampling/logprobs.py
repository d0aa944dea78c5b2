"""Log probabilities of sampled tokens and of the top-n alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from worker.engines import TokenLogprob
from worker.engines.embedded.logits_tap import UnusableRow
from worker.engines.embedded.native import scoring
from worker.engines.embedded.plan import Samples
from worker.engines.embedded.sampling.row_errors import NOT_FINITE

Ids = slice | torch.Tensor | None
"""Ids as an index, None for no id."""


def as_index(ids: Sequence[int], vocab_size: int) -> Ids:
    """Rising ids as an index: a slice, which is cheaper to fill, where they are a tail as padding
    is.
    """
    if not ids:
        return None
    if tuple(ids) == tuple(range(ids[0], vocab_size)):
        return slice(ids[0], vocab_size)
    return torch.tensor(ids)


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int], never: Ids = None
) -> list[list[TokenLogprob]]:
    """The sampled token, then the top-n, for each row.

    Ranks are 1-based, by falling probability, ties by rising id. The top-n excludes masked tokens.
    The token's value is NaN where the highest logit of its row is not finite.
    Native kernels compute on the CPU (`native.scoring`), torch elsewhere and for gradients: their
    results differ in the last bits of float64, and so in ranks of tokens that differ no more, and
    of masked ones.

    Args:
        logits: floating ``[m, V]``, not normalised.
        token_ids: Sampled id of each row.
        counts: n of each row's top-n.
        never: Ids that are never sampled: part of the whole, as in a trainer's forward pass, but
            neither ranked nor among the top-n.
    """
    if scoring.can_score(logits):
        found = scoring.score(logits, token_ids, counts, never)
        return [scored(*one) for one in zip(token_ids, found, strict=True)]
    logprobs = logits.double().log_softmax(-1)
    sampled = torch.tensor(token_ids, device=logits.device)[:, None]
    unusable = ~logits.detach().amax(-1, keepdim=True).isfinite()  # of +inf the others have -inf
    chosen = logprobs.gather(-1, sampled).masked_fill(unusable, math.nan)
    if never is not None:
        logprobs[:, never] = -torch.inf
    values = chosen[:, 0].tolist()
    ranked = zip(token_ids, values, _ranks(logprobs.detach(), token_ids, values), strict=True)
    tops = _tops(logprobs, counts) if max(counts) else [[]] * len(token_ids)
    return [[TokenLogprob(*one), *top] for one, top in zip(ranked, tops, strict=True)]


def text_logprobs(
    rows: torch.Tensor, token_ids: Sequence[int], count: int, first: int, never: Ids = None
) -> list[list[TokenLogprob]]:
    """`token_logprobs` of tokens of a text, in float32 on the CPU: their bits are those of answers.

    Args:
        rows: Logits ``[m, V]`` that the tokens follow.
        token_ids: Token id of each.
        count: n of every top-n.
        first: Position of the first token.
        never: See `token_logprobs`.

    Raises:
        UnusableRow: a row holds NaN or +inf, or no finite logit.
    """
    found = token_logprobs(rows.to("cpu", torch.float32), token_ids, [count] * len(token_ids), never)
    for position, entries in enumerate(found, first):
        if math.isnan(entries[0].logprob):
            raise UnusableRow(f"token {position} has no log probability: {NOT_FINITE}")
    return found


def scored(token_id: int, score: scoring.Score) -> list[TokenLogprob]:
    """Give what native kernels found of a row the form of `token_logprobs`."""
    top = [TokenLogprob(*one, rank) for rank, one in enumerate(score.top, start=1)]
    return [TokenLogprob(token_id, score.logprob, score.rank), *top]


def weight_logprobs(weights: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[list[TokenLogprob]]:
    """`token_logprobs` of what tokens are sampled from, with the bits of `native.drawing`.

    The formula, in float64, is ``log(weight) - log(sum of the weights)``.

    Args:
        weights: int64 ``[m, V]`` of `truncation.truncate_and_sample`.
        token_ids: Sampled id of each row, or another one that could be.
        counts: n of each row's top-n.
    """
    exact = weights.double().masked_fill_(weights == 0, -torch.inf)  # below 2 ** 53
    values = exact.gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    tops = _tops(exact, counts) if max(counts) else [[]] * len(token_ids)
    found = []
    ranks, totals = _ranks(exact, token_ids, values), weights.sum(-1).tolist()
    for token_id, value, rank, total, top in zip(token_ids, values, ranks, totals, tops, strict=True):
        log_total = math.log(total)
        entries = [TokenLogprob(token_id, value, rank), *top]
        found.append([replace(one, logprob=_log(one.logprob) - log_total) for one in entries])
    return found


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def _ranks(logprobs: torch.Tensor, token_ids: Sequence[int], values: Sequence[float]) -> list[int]:
    """Rank of each row's token, whose value that is.

    Rows on a device are counted there. On a CPU numpy takes a tenth of torch's time.
    """
    is_on_cpu = logprobs.device.type == "cpu"
    count: Callable[[Any], Any] = np.count_nonzero if is_on_cpu else torch.count_nonzero
    counts = [
        count(row > value) + count(row[:token] == value)
        for row, token, value in zip(logprobs.numpy() if is_on_cpu else logprobs, token_ids, values, strict=True)
    ]
    return [1 + int(ahead) for ahead in counts]


def _tops(logprobs: torch.Tensor, counts: Sequence[int]) -> list[list[TokenLogprob]]:
    # one more than wanted, to detect a tie with the last value, of which `topk` takes any
    all_values, all_ids = (each.tolist() for each in logprobs.topk(min(max(counts) + 1, logprobs.shape[-1])))
    tops = []
    for row, (count, values, ids) in enumerate(zip(counts, all_values, all_ids, strict=True)):
        last = values[-1]
        if 0 < count < len(values) and values[count - 1] == last > -math.inf:  # masked tokens tie, too
            ahead = sum(value > last for value in values)
            tied = (logprobs[row] == last).nonzero()[: count - ahead, 0].tolist()
            values, ids = values[:ahead] + [last] * len(tied), ids[:ahead] + tied
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


def attach_masses(
    samples: Samples, rows: Sequence[int], raw: torch.Tensor, temperatures: Sequence[float], left: torch.Tensor
) -> None:
    """Complete the raw log probabilities of `rows` for a trainer; see `TokenLogprob`.

    With ``z`` the model's logits divided by the temperature, the mass of the tokens K that could be
    sampled is ``softmax(z)[t] / softmax(z over K)[t]`` for any t in K. So, where processors only
    mask, ``log softmax(z)[t]`` is the processed log probability plus the mass's logarithm.

    Args:
        samples: Sampled tokens, with the raw and processed log probabilities of `rows`.
        rows: Rows of a batch.
        raw: The model's logits of them, floating ``[m, V]``.
        temperatures: Temperature of each.
        left: The same, -inf for tokens that could not be sampled; at least one could be in a row
            without an error.
    """
    sampled = [samples.token_ids[row] for row in rows]
    divisors = torch.tensor(temperatures, dtype=torch.float64) if set(temperatures) != {1.0} else None
    whole = _values(raw, sampled, divisors)
    part = _values(left, sampled, divisors)
    for row, own, of_kept in zip(rows, whole, part, strict=True):
        samples.logprobs[row][0] = replace(
            samples.logprobs[row][0],
            processed=samples.processed[row],
            tempered=own,
            log_mass=-math.inf if math.isnan(of_kept) else min(own - of_kept, 0.0),
        )


def _values(logits: torch.Tensor, token_ids: Sequence[int], divisors: torch.Tensor | None) -> list[float]:
    """Log probability of a token of each row of divided logits, as in `token_logprobs`."""
    if scoring.can_score(logits):
        return [one.logprob for one in scoring.score(logits, token_ids, [0] * len(token_ids), divisors=divisors)]
    divided = logits.double() if divisors is None else logits.double() / divisors[:, None]
    return divided.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
