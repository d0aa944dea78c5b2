"""Temperature, min-p, top-k, top-p and sampling: logits and a uniform to a token.

Order: temperature, then min-p, then top-k, renormalised, then top-p, each with the rule of
`adapters.sampling`, which the processors of these names apply to whole rows. Sums of weights are
exact, so that a token depends on its row, its controls and its uniform random number alone, bit for
bit, whichever path finds it.

On a CPU one kernel draws the tokens of a batch (`native.drawing.Drawer`). Here are those of rows on
a device, and without kernels; and the weights of rows for those who look at all of them. A few
hundred of the highest logits nearly always include every token that can be sampled. It is detected
when they do not; then the weights of the whole row are computed, one row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch

from adapters.devices import upload
from adapters.row_kernels import WholeRow
from adapters.sampling.candidates import order_ties, sort_ids, top, top_in_order
from adapters.sampling.prefixes import mass_among, prefix_of_ordered
from adapters.sampling.truncation import GREEDY_BELOW, bound_of, log_of, lowest_kept, rounded_up
from adapters.sampling.weights import (
    point_in_one,
    points_in,
    share_of,
    share_of_one,
    weigh,
)
from adapters.sampling.whole_row import block_maxima, whole_row

_WIDTHS = (32, 64, 128, 256, 512, 1024)
"""Numbers of candidates: few distinct ones, so that rows of similar controls share a group."""

_WIDTH_WITHOUT_TOP_K = 128
_HIGHEST = torch.finfo(torch.float32).max
_ROOM_FOR_TIES = 14
"""Candidates beyond top-k, at least: logits that tie with the k-th are kept."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Temperature and truncation of one row.

    Attributes:
        temperature: Above 0; below `GREEDY_BELOW` the row is greedy.
        min_p: Keep tokens of at least this probability relative to the highest; off: 0.
        top_k: Keep the k highest logits, and ties with the lowest of them; off: 0.
        top_p: Keep the shortest prefix, by falling logit and rising id, of at least this mass;
            above 0, off: 1.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def divisor(self) -> float:
        """Divisor of the logits; 1 where the row is greedy."""
        return 1.0 if self.temperature < GREEDY_BELOW else min(self.temperature, _HIGHEST)

    @property
    def share(self) -> float:
        """The share of the weight that a prefix has; of a greedy row, that of its first token."""
        return 0.0 if self.temperature < GREEDY_BELOW else self.top_p


def truncate_and_sample(
    logits: torch.Tensor,
    groups: Sequence[Group],
    uniforms: Mapping[int, float],
    maxima: torch.Tensor | None = None,
    wanted: AbstractSet[int] = frozenset(),
) -> tuple[dict[int, int], dict[int, torch.Tensor]]:
    """Sample a token for every row of the groups.

    Args:
        logits: float32 ``[B, V]``; the rows of `groups` hold a finite value, and otherwise finite
            ones or -inf. Of those on a device, candidates alone are copied where they suffice.
        groups: Result of `group_rows`.
        uniforms: A random number in [0, 1) for each row.
        maxima: `adapters.sampling.candidates.block_maxima` of `logits`.
        wanted: Rows whose weights are returned.

    Returns:
        Token id by row; and for the rows `wanted`, int64 ``[V]``: the weight of each token, 0 for
        a token that cannot be sampled.
    """
    if maxima is None:
        maxima = block_maxima(logits)
    sampling = _Sampling(logits, maxima, uniforms, wanted)
    for group in groups:
        if group.rows:  # nobody is left in one whose rows are all unfit
            sampling.sample(group)
    return sampling.token_ids, sampling.kept


class Group:
    """Rows with the same number of candidates, which are found and weighted together.

    Args:
        controls: Controls by row; top-k below `vocab_size`.
        width: Candidates per row; 0 for rows whose every logit gets a weight.
        vocab_size: Width of a row of logits.

    Attributes:
        is_wide: Whether no row's nucleus was within the candidates at the last step. It likely will
            not be at the next step either, so that searching for candidates is skipped.
    """

    def __init__(self, controls: dict[int, Controls], width: int, vocab_size: int) -> None:
        def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype)[:, None]

        rows = list(controls.values())
        self.controls = controls
        self.rows = list(controls)
        self.width = width
        self.is_wide = False
        self.vocab_size = vocab_size
        self.index = torch.tensor(self.rows, dtype=torch.long)
        self.divisor = None
        if any(one.divisor != 1 for one in rows):
            self.divisor = column([one.divisor for one in rows], torch.float32)
        self.log_min_p = column([log_of(one.min_p) for one in rows]) if any(one.min_p for one in rows) else None
        self.last = None
        if any(one.top_k for one in rows):
            lasts = [min(one.top_k or width, width) - 1 for one in rows]
            self.last = torch.tensor(lasts, dtype=torch.long)[:, None]
        self.share = None
        if any(one.share < 1 for one in rows):
            self.share = column([one.share for one in rows])

    def bound(self, values: torch.Tensor) -> torch.Tensor | None:
        """Logit below which min-p or top-k exclude a token, ``[R, 1]``; None if both are off.

        Args:
            values: Candidates ``[R, n]``, divided by the temperature, by falling logit.
        """
        by_min_p = None if self.log_min_p is None else bound_of(values[:, :1], self.log_min_p)
        kth = None if self.last is None else values.gather(1, self.last)
        return kth if by_min_p is None else by_min_p if kth is None else torch.maximum(by_min_p, kth)

    @property
    def is_truncated(self) -> bool:
        """Whether any control but the temperature is on."""
        return self.log_min_p is not None or self.last is not None or self.share is not None

    def without(self, rows: AbstractSet[int]) -> Group:
        """This group less some rows."""
        rest = {row: one for row, one in self.controls.items() if row not in rows}
        return self if len(rest) == len(self.rows) else Group(rest, self.width, self.vocab_size)


def group_rows(controls: Mapping[int, Controls], vocab_size: int) -> list[Group]:
    """Rows grouped by width, so that no row pays for another row's controls."""
    found: dict[int, dict[int, Controls]] = {}
    for row, one in controls.items():
        if one.top_k >= vocab_size:
            one = replace(one, top_k=0)
        found.setdefault(_width(one, vocab_size), {})[row] = one
    return [Group(members, width, vocab_size) for width, members in sorted(found.items())]


def _width(controls: Controls, vocab_size: int) -> int:
    """Candidates that suffice for nearly every row; depends on the row's own controls alone."""
    if controls.top_k:
        needed = controls.top_k + max(_ROOM_FOR_TIES, controls.top_k // 4)
    elif controls.min_p > 0 or controls.share < 1:
        needed = _WIDTH_WITHOUT_TOP_K
    else:
        return 0
    # beyond the largest width, candidates save nothing over the whole row
    return next((min(width, vocab_size) for width in _WIDTHS if needed <= width), 0)


@dataclass(slots=True)
class _Candidates:
    """The highest logits of some rows, by falling logit and rising id.

    Attributes:
        values: float32 ``[R, n]``, divided by the temperature.
        ids: int64 ``[R, n]``.
        weights: int64 ``[R, n]``; 0 where min-p or top-k exclude a token.
        complete: bool ``[R, 1]``; whether every token with a weight is a candidate.
    """

    values: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    complete: torch.Tensor


class _RowWeights:
    """The weights of a whole row, one row at a time.

    Args:
        logits: float32 ``[B, V]``.
        maxima: `adapters.sampling.candidates.block_maxima` of `logits`.
    """

    def __init__(self, logits: torch.Tensor, maxima: torch.Tensor) -> None:
        self._logits = logits
        self._maxima = maxima

    @cached_property
    def row(self) -> WholeRow:
        """The row that was weighed last."""
        return whole_row(self._logits.shape[1])

    @cached_property
    def _divided(self) -> torch.Tensor:
        """Memory of a row that is divided by its temperature."""
        return torch.empty_like(self._logits[0], device="cpu")

    @cached_property
    def _highest(self) -> torch.Tensor:
        return self._maxima.amax(-1).cpu()

    def divide(self, group: Group, index: int) -> torch.Tensor:
        """A row of a group divided by its temperature; valid until the next call."""
        logits = self._logits[group.rows[index]].cpu()
        return logits if group.divisor is None else torch.div(logits, group.divisor[index], out=self._divided)

    def weigh(self, group: Group, index: int, logits: torch.Tensor, kth: torch.Tensor | None) -> int:
        """Compute the weights of a row; returns the weight that top-p keeps.

        Args:
            group: The row's group.
            index: Index of the row in the group.
            logits: Result of `divide`.
            kth: The k-th highest of `logits`, None without top-k.
        """
        highest = self._highest[group.rows[index], None]
        if group.divisor is not None:
            highest = highest / group.divisor[index]
        lowest = -math.inf if kth is None else float(kth)
        if group.log_min_p is not None:
            lowest = max(lowest, float(lowest_kept(highest, group.log_min_p[index])))
        total = self.row.weigh(logits, float(highest), lowest)
        return share_of_one(total, group.controls[group.rows[index]].share)


class _Sampling:
    """One call of `truncate_and_sample`."""

    def __init__(
        self, logits: torch.Tensor, maxima: torch.Tensor, uniforms: Mapping[int, float], wanted: AbstractSet[int]
    ) -> None:
        self._logits = logits
        self._maxima = maxima
        self._uniforms = uniforms
        self._wanted = wanted
        self._weights = _RowWeights(logits, maxima)
        self.token_ids: dict[int, int] = {}
        self.kept: dict[int, torch.Tensor] = {}

    def sample(self, group: Group) -> None:
        if not group.is_truncated and _weighs(self._logits.device):
            self._sample_on_device(group)
            return
        if not group.width or group.is_wide:
            kept = [self._sample_whole(group, index) for index in range(len(group.rows))]
            group.is_wide = min(kept) > group.width > 0
            return
        found = self._candidates(group)
        targets = None if group.share is None else share_of(found.weights.sum(-1, keepdim=True), group.share)
        done: set[int] = set()
        if not bool(found.complete.all()):
            done = self._settle_incomplete(group, found, targets)
        if len(done) < len(group.rows):
            self._sample_candidates(group, found, targets, done)
        group.is_wide = len(done) == len(group.rows) and group.log_min_p is None and group.last is None

    def _candidates(self, group: Group) -> _Candidates:
        every = len(group.rows) == len(self._logits)
        index = upload(group.index, self._logits.device)
        maxima = self._maxima if every else self._maxima.index_select(0, index)
        rows = None if every else index
        if self._is_on_device:
            values, ids = (each.cpu() for each in top(self._logits, group.width, maxima, rows))
            values, ids = order_ties(values, ids, group.divisor)
        else:
            values, ids = top_in_order(self._logits, group.width, maxima, rows, divisors=group.divisor)
        weights = weigh(values, values[:, :1], group.vocab_size)
        last = values[:, -1:]
        complete = (last == -torch.inf) if group.width < group.vocab_size else torch.ones_like(last, dtype=torch.bool)
        bound = group.bound(values)
        if bound is not None:
            complete = complete | (last < bound)
            weights = weights.mul_(values >= bound)
        return _Candidates(values, ids, weights, complete)

    def _settle_incomplete(self, group: Group, found: _Candidates, targets: torch.Tensor | None) -> set[int]:
        """Resolve the rows for which the candidates do not hold all of the weight.

        Sets `targets` for those whose prefix ends among the candidates all the same, samples the
        others from the whole row. Returns the indices in the group that have a token now.
        """
        sure = mass_among(found.values, found.weights).tolist()
        done: set[int] = set()
        totals = self._totals_on_device(group, found) if _weighs(self._logits.device) else None
        for index, complete in enumerate(found.complete[:, 0].tolist()):
            if complete:
                continue
            row = group.rows[index]
            share = group.controls[row].share
            target = self._weigh(group, index, found) if totals is None else share_of_one(totals[index], share)
            if targets is not None and share < 1 and sure[index] >= target:
                targets[index] = target
                continue
            if totals is not None:
                self._weigh(group, index, found)  # the row is needed after all
            self._sample_from_row(row, target)
            done.add(index)
        return done

    def _weigh(self, group: Group, index: int, found: _Candidates) -> int:
        """See `_RowWeights.weigh`; the k-th highest logit is among the candidates."""
        top_k = group.controls[group.rows[index]].top_k
        kth = found.values[index, min(top_k, group.width) - 1] if top_k else None
        return self._weights.weigh(group, index, self._weights.divide(group, index), kth)

    @property
    def _is_on_device(self) -> bool:
        return self._logits.device.type == "cuda"

    def _sample_on_device(self, group: Group) -> None:
        """Sample rows without truncation, by the weights of all of their tokens."""
        uniforms = [self._uniforms[row] for row in group.rows]
        drawn = self._drawn_on_device(group, torch.full((len(group.rows),), -torch.inf), uniforms)
        self.token_ids.update(zip(group.rows, (token for token, _ in drawn), strict=True))

    def _totals_on_device(self, group: Group, found: _Candidates) -> list[int]:
        """The weight of each row of a group."""
        bound = group.bound(found.values)
        lowest = torch.full((len(group.rows),), -torch.inf) if bound is None else rounded_up(bound, torch.float32)[:, 0]
        return [total for _, total in self._drawn_on_device(group, lowest, [0.0] * len(group.rows))]

    def _drawn_on_device(self, group: Group, lowest: torch.Tensor, uniforms: list[float]) -> list[tuple[int, int]]:
        """A token of each row of a group, and the row's weight; see `cuda.sample`."""
        from worker.engines.embedded import cuda  # triton is there with CUDA alone

        device, divisor = self._logits.device, group.divisor
        divisors = torch.ones(len(group.rows)) if divisor is None else divisor[:, 0]
        index, divisors, lowest = (upload(each.contiguous(), device) for each in (group.index, divisors, lowest))
        highest = self._maxima.amax(-1).index_select(0, index) / divisors
        numbers = upload(torch.tensor(uniforms, dtype=torch.float64), device)
        drawn: list[tuple[int, int]] = cuda.sample(self._logits, index, divisors, highest, lowest, numbers).tolist()
        return drawn

    def _sample_candidates(
        self, group: Group, found: _Candidates, targets: torch.Tensor | None, done: AbstractSet[int]
    ) -> None:
        weights = found.weights
        if targets is not None:
            weights = prefix_of_ordered(weights, targets)
        ids, order = sort_ids(found.ids)
        cumulative = weights.gather(1, order).cumsum_(-1)
        uniforms = torch.tensor([self._uniforms[row] for row in group.rows], dtype=torch.float64)[:, None]
        columns = torch.searchsorted(cumulative, points_in(cumulative[:, -1:], uniforms), right=True)
        token_ids = ids.gather(1, columns)[:, 0].tolist()
        for index, row in enumerate(group.rows):
            if index not in done:
                self.token_ids[row] = token_ids[index]
                if row in self._wanted:
                    self._keep_weights(row, found.ids[index], weights[index])

    def _sample_whole(self, group: Group, index: int) -> int:
        logits = self._weights.divide(group, index)
        top_k = group.controls[group.rows[index]].top_k
        kth = logits.topk(top_k).values[-1] if top_k else None
        return self._sample_from_row(group.rows[index], self._weights.weigh(group, index, logits, kth))

    def _sample_from_row(self, row: int, target: int) -> int:
        """Sample from the row weighed last; returns the number of tokens that top-p keeps."""
        weighed = self._weights.row
        if target < weighed.total:
            ids, weights = weighed.prefix(target)
            cumulative = weights.numpy().cumsum()  # numpy's calls cost half of torch's on small arrays
            point = point_in_one(int(cumulative[-1]), self._uniforms[row])
            column = int(cumulative.searchsorted(point, "right"))
            self.token_ids[row] = column if ids is None else int(ids[column])
            if row in self._wanted:
                self._keep_weights(row, ids, weights)
            return int(np.count_nonzero(weights.numpy()))
        self.token_ids[row] = weighed.token_at(point_in_one(weighed.total, self._uniforms[row]))
        if row in self._wanted:
            self.kept[row] = weighed.weights()
        return self._logits.shape[1]

    def _keep_weights(self, row: int, ids: torch.Tensor | None, weights: torch.Tensor) -> None:
        if ids is not None:
            weights = torch.zeros(self._logits.shape[1], dtype=torch.int64).scatter_(0, ids, weights)
        self.kept[row] = weights


@cache
def _weighs(device: torch.device) -> bool:
    """Whether whole rows are weighed on `device`, by Triton's kernels; else they are copied."""
    if device.type != "cuda":
        return False
    from worker.engines.embedded.model.kernels import no_triton  # which no sampler on a CPU needs

    return no_triton(device) is None
