"""Rows of logits with fewer tokens, in place: the rules that processors, pipes and samplers share.

Two rules decide what is kept. A *bound* keeps the tokens at least so many times as likely as the
most likely one: a lowest logit (`lowest_kept`), which min-p says itself and top-a, epsilon, eta and
XTC say as a share of the row's weight (`total_weights`). A *prefix* keeps the most likely tokens
up to a share of the weight (`adapters.sampling.prefixes`): top-p and typical-p. Both are functions
of float32 logits that the temperature has divided (`divide_`), so that a control does the same
whether a processor applies it to the row or a sampler to the few tokens it looks at.

Rows whose highest logit is not finite are left unchanged. Batch-invariant bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from adapters.row_kernels import WholeRow
from adapters.sampling.candidates import block_maxima, highest_ids, top, top_in_order
from adapters.sampling.prefixes import beyond_prefix, mass_among, prefix_of_mass, prefix_of_ordered
from adapters.sampling.weights import share_of, share_of_one, weigh, weight_bits, weights_of
from adapters.sampling.whole_row import block_maxima as host_block_maxima
from adapters.sampling.whole_row import whole_row

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: only the lowest id of the highest logits is kept."""

_WIDEST_TOPK = 1024
_ROWS_AT_ONCE = 32
"""Rows whose weights are computed at once: they take four times the memory of the logits."""

_IN_CACHE = 2**17
"""Tokens whose weights are computed at once on the CPU."""

_FEW = 128
"""Tokens among which a prefix mostly ends."""


def divide_(logits: torch.Tensor, temperatures: Sequence[float]) -> None:
    """Divide each row of float ``[B, V]`` by its temperature, in the precision of the logits.

    Below `GREEDY_BELOW` only the most likely token is kept.
    """
    greedy = [row for row, value in enumerate(temperatures) if value < GREEDY_BELOW]
    logits.div_(column([1.0 if value < GREEDY_BELOW else value for value in temperatures], logits))
    keep_most_likely(logits, greedy)


def keep_most_likely(logits: torch.Tensor, rows: Sequence[int]) -> None:
    """Mask all but the highest logit in ``rows`` of float ``[B, V]``; ties keep the lowest id."""
    if not rows:
        return
    part = logits[rows]
    best = highest_ids(part, block_maxima(part)).unsqueeze(1)
    highest = part.gather(-1, best)
    logits[rows] = part.fill_(-torch.inf).scatter_(-1, best, highest)


def keep_top_k(keys: torch.Tensor, ks: Sequence[int]) -> None:
    """Mask all but the ``ks[i]`` highest of row i of float ``[B, V]`` and ties with the last.

    0 and ``k >= V`` keep all; ``k = 1`` keeps only the lowest of the tied ids.
    """
    width = keys.shape[1]
    keep_most_likely(keys, [row for row, k in enumerate(ks) if k == 1])
    rows = [row for row, k in enumerate(ks) if 1 < k < width]
    narrow = [row for row in rows if ks[row] <= _WIDEST_TOPK]
    for together in (narrow, *([row] for row in rows if ks[row] > _WIDEST_TOPK)):
        if together:
            _keep_top_k(keys, together, [ks[row] for row in together])


def keep_min_p(logits: torch.Tensor, ps: Sequence[float]) -> None:
    """Mask the tokens less than ``ps[i]`` times as likely as the highest of row i of ``[B, V]``.

    0 keeps all; 1 keeps only the lowest of the tied ids.
    """
    if not any(ps):
        return
    bounds = column([log_of(p) for p in ps], logits, torch.float64)
    logits.masked_fill_(logits < lowest_kept(logits.amax(-1, keepdim=True), bounds), -torch.inf)
    keep_most_likely(logits, [row for row, p in enumerate(ps) if p == 1])


def log_of(ratio: float) -> float:
    """Natural logarithm, -inf of 0."""
    return math.log(ratio) if ratio > 0 else -math.inf


def bound_of(highest: torch.Tensor, log_ratios: torch.Tensor) -> torch.Tensor:
    """Below this, float64 ``[R, 1]``, a logit is dropped where a token must be ``exp(log_ratios)``
    times as likely as the most likely one; for a few logits, which are compared in float64.
    """
    return highest.double() + log_ratios


def lowest_kept(highest: torch.Tensor, log_ratios: torch.Tensor) -> torch.Tensor:
    """`bound_of`, rounded up to the logits' precision, which keeps the same; for whole rows.

    Args:
        highest: Logit of each row, float ``[R, 1]``.
        log_ratios: Logarithms, at most 0 where the most likely token is kept, float64 ``[R, 1]``.

    Returns:
        ``[R, 1]`` with the dtype of `highest`; a token is kept if its logit is not lower.
    """
    return rounded_up(bound_of(highest, log_ratios), highest.dtype)


def rounded_up(bounds: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The lowest numbers of a dtype that are not below float64 `bounds`."""
    found = bounds.to(dtype)
    above = torch.nextafter(found, torch.full_like(found, torch.inf))
    return torch.where(found.double() < bounds, above, found)


def keep_share(logits: torch.Tensor, shares: torch.Tensor, totals: torch.Tensor) -> None:
    """Mask the tokens of float ``[B, V]`` that have less than a share of their row's weight.

    The most likely token is always kept.

    Args:
        logits: float ``[B, V]``.
        shares: float64 ``[B, 1]``; 0 keeps all.
        totals: `total_weights` of the rows.
    """
    log_ratios = (shares * totals).clamp_(max=1.0).log_()
    logits.masked_fill_(logits < lowest_kept(logits.amax(-1, keepdim=True), log_ratios), -torch.inf)


def weights_of_rows(logits: torch.Tensor) -> torch.Tensor:
    """Same as `weights.weights_of`, in half the time on the CPU."""
    if not is_weighed_on_host(logits):
        return weights_of(logits)
    weights = torch.zeros_like(logits, dtype=torch.int64)
    for row, found in zip(weights, _weighed(logits), strict=True):
        if found is not None:
            row.copy_(found.weights())
    return weights


def total_weights(logits: torch.Tensor) -> torch.Tensor:
    """Sums of the weights of float ``[B, V]``, relative to that of the most likely token, float64
    ``[B, 1]``; the sums are exact. 0 for a row whose highest logit is not finite.
    """
    unit = 2.0 ** -weight_bits(logits.shape[1])
    if is_weighed_on_host(logits):
        totals = [0 if found is None else found.total for found in _weighed(logits)]
        return torch.tensor(totals, dtype=torch.float64).unsqueeze(1) * unit
    starts = range(0, len(logits), _ROWS_AT_ONCE)
    sums = [weights_of(logits[start : start + _ROWS_AT_ONCE]).sum(-1, keepdim=True) for start in starts]
    return torch.cat(sums).double() * unit


def keep_top_p(logits: torch.Tensor, ps: Sequence[float]) -> None:
    """Mask all but the nucleus of mass at least ``ps[i]`` in row i of float logits ``[B, V]``.

    By falling logit, ties by rising id. 1 keeps all, 0 the most likely token.
    """
    rows = [row for row, p in enumerate(ps) if p < 1.0]
    if not rows:
        return
    if is_weighed_on_host(logits):
        _keep_top_p_on_host(logits, rows, ps)
        return
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        index = rows[start : start + _ROWS_AT_ONCE]
        part = take(logits, index)
        drop(logits, index, part, _beyond(part, weights_of(part), [ps[row] for row in index]))


def _keep_top_p_on_host(logits: torch.Tensor, rows: list[int], ps: Sequence[float]) -> None:
    maxima = host_block_maxima(logits)
    highest = maxima.amax(-1).tolist()
    rows = [row for row in rows if math.isfinite(highest[row])]
    if not rows:
        return
    some = None if len(rows) == len(logits) else torch.tensor(rows)
    chosen = maxima if some is None else maxima[some]
    values, ids = top_in_order(logits, min(_FEW, logits.shape[1]), chosen, some)
    weights = weigh(values, values[:, :1], logits.shape[1])
    sure = mass_among(values, weights).tolist()
    weigher = whole_row(logits.shape[1])
    for index, row in enumerate(rows):
        target = share_of_one(weigher.weigh(logits[row], highest[row]), ps[row])
        if sure[index] >= target:
            kept = prefix_of_ordered(weights[index : index + 1], torch.tensor([[target]]))[0]
            _keep_only(logits[row], ids[index], kept)
        else:
            _keep_only(logits[row], *weigher.prefix(target))


def beyond_shares(
    keys: torch.Tensor, weights: Callable[[slice], torch.Tensor], shares: Sequence[float]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time, and which of their tokens follow the prefix of a share of the weight.

    Args:
        keys: float ``[R, V]``, by which tokens are ordered, ties by rising id; without NaN.
        weights: Function of some rows that returns their integer weights, int64 ``[r, V]``.
        shares: One for each row; nothing follows a share of 1.

    Yields:
        The rows, and bool ``[r, V]``.
    """
    at_once = max(1, _IN_CACHE // keys.shape[1]) if is_weighed_on_host(keys) else _ROWS_AT_ONCE
    for start in range(0, len(keys), at_once):
        some = slice(start, start + at_once)
        yield some, _beyond(keys[some], weights(some), shares[some])


def _beyond(keys: torch.Tensor, weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Mask of the tokens that follow the prefix of a share of the weight, bool ``[R, V]``."""
    totals = weights.sum(-1, keepdim=True)
    if not is_weighed_on_host(keys):
        wanted = column(shares, keys, torch.float64)
        return beyond_prefix(keys, weights, share_of(totals, wanted)) & (wanted < 1)
    beyond = torch.zeros_like(keys, dtype=torch.bool)
    for row, (total, share) in enumerate(zip(totals[:, 0].tolist(), shares, strict=True)):
        if total > 0 and share < 1:
            ids = _inside(keys[row], weights[row], total, share_of_one(total, share))
            beyond[row] = True
            beyond[row, ids] = False
    return beyond


def _inside(keys: torch.Tensor, weights: torch.Tensor, total: int, target: int) -> torch.Tensor:
    """Ids of one row's prefix that have a weight."""
    values, ids = top_in_order(keys[None], min(_FEW, len(keys)))
    found = weights[ids[0]]
    if int(mass_among(values, found[None])) >= target:
        return ids[0, prefix_of_ordered(found[None], torch.tensor([[target]]))[0] > 0]
    reaching, kept = prefix_of_mass(keys, weights, total, target)
    chosen = (kept > 0).nonzero()[:, 0]
    return chosen if reaching is None else reaching[chosen]


def is_weighed_on_host(logits: torch.Tensor) -> bool:
    """Whether rows are weighed one at a time, by what `whole_row` returns."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def _weighed(logits: torch.Tensor) -> Iterator[WholeRow | None]:
    """Each row's weights, None where its highest logit is not finite; until the next one."""
    if not len(logits):
        return
    weigher = whole_row(logits.shape[1])
    for row, highest in zip(logits, host_block_maxima(logits).amax(-1).tolist(), strict=True):
        if math.isfinite(highest):
            weigher.weigh(row, highest)
            yield weigher
        else:
            yield None


def _keep_only(row: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor) -> None:
    """Mask all but the `ids` (None: all) that have a weight."""
    if ids is None:
        row.masked_fill_(weights == 0, -torch.inf)
        return
    ids = ids[weights > 0]
    kept = row[ids]
    row.fill_(-torch.inf)
    row[ids] = kept


def _keep_top_k(logits: torch.Tensor, rows: list[int], ks: list[int]) -> None:
    part = take(logits, rows)
    last = torch.tensor(ks).unsqueeze(1).to(logits.device, non_blocking=True) - 1
    cuts = top(part, max(ks))[0].gather(-1, last)
    drop(logits, rows, part, part < cuts)


def column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``[R, 1]`` on the device of ``like``, with its dtype by default."""
    return torch.tensor(values, dtype=dtype or like.dtype).unsqueeze(1).to(like.device, non_blocking=True)


def take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows: themselves if they are all, else a copy."""
    return logits if len(rows) == len(logits) else logits[rows]


def drop(logits: torch.Tensor, rows: list[int], part: torch.Tensor, mask: torch.Tensor) -> None:
    """Mask ``rows``, whose values `take` returned as ``part``."""
    part.masked_fill_(mask, -torch.inf)
    if part is not logits:
        logits[rows] = part
