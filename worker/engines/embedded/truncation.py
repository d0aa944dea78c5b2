"""Temperature, min-p, top-k, top-p and the draw: a row of logits and a uniform number to a token.

Order: temperature, then min-p, then top-k, renormalised, then top-p. Weights are ``exp((z - max z) / T)`` in float64.
A few hundred of the highest logits nearly always hold all that can be drawn, and it is known when they do not: then
the whole row is weighed, one row at a time. Either way the cumulative weights are summed in one fixed order, so that a
token depends on its row, its controls and its number alone, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from adapters.candidates import BLOCK, block_maxima, num_blocks, prefix_of_mass, sort_ids, top_in_order

_WIDTHS = (32, 64, 128, 256, 512, 1024)
_WIDTH_WITHOUT_TOP_K = 128
_ROOM_FOR_TIES = 14


@dataclass(frozen=True, slots=True)
class Controls:
    """What one row asks for.

    Attributes:
        temperature: Above 0.
        min_p: Keep tokens at least this likely relative to the likeliest; off: 0.
        top_k: Keep the k highest logits, and ties with the lowest of them; off: 0.
        top_p: Keep the shortest prefix, by falling logit and rising id, of at least this mass; above 0, off: 1.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def draw(
    logits: torch.Tensor,
    groups: Sequence[Group],
    uniforms: Mapping[int, float],
    maxima: torch.Tensor | None = None,
    wanted: AbstractSet[int] = frozenset(),
) -> tuple[dict[int, int], dict[int, torch.Tensor]]:
    """Draw a token for every row of the groups.

    Args:
        logits: float32 ``[B, V]``; the rows of `groups` hold a finite value, the others there are finite or -inf.
        groups: From `group_rows`.
        uniforms: A number in [0, 1) for each row.
        maxima: `adapters.candidates.block_maxima` of `logits`.
        wanted: Rows whose distribution is asked for.

    Returns:
        Token id by row; and for the rows `wanted`, float64 ``[V]``: the logarithm of each token's weight, -inf for a
        token that cannot be drawn.
    """
    if maxima is None:
        maxima = block_maxima(logits)
    drawing = _Drawing(logits, maxima, uniforms, wanted)
    for group in groups:
        drawing.draw(group)
    return drawing.token_ids, drawing.distributions


class Group:
    """Rows that are treated alike: the same number of candidates, found and weighed together.

    Args:
        controls: By row; top-k below `vocab_size`.
        width: Candidates per row; 0 for rows that are weighed whole.
        vocab_size: Width of a row of logits.
        device: Where logits are.
    """

    def __init__(self, controls: dict[int, Controls], width: int, vocab_size: int, device: torch.device) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        rows = list(controls.values())
        self.controls = controls
        self.rows = list(controls)
        self.width = width
        self.vocab_size = vocab_size
        self.index = torch.tensor(self.rows, dtype=torch.long, device=device)
        self.temperature = column([one.temperature for one in rows])
        self.min_p = column([one.min_p for one in rows]) if any(one.min_p for one in rows) else None
        self.last = None
        if any(one.top_k for one in rows):
            places = [min(one.top_k or width, width) - 1 for one in rows]
            self.last = torch.tensor(places, dtype=torch.long, device=device)[:, None]
        self.top_p = None
        if any(one.top_p < 1 for one in rows):
            self.top_p = column([one.top_p if one.top_p < 1 else math.inf for one in rows])

    def without(self, rows: AbstractSet[int]) -> Group:
        """This group less some rows."""
        rest = {row: one for row, one in self.controls.items() if row not in rows}
        return self if len(rest) == len(self.rows) else Group(rest, self.width, self.vocab_size, self.index.device)


def group_rows(controls: Mapping[int, Controls], vocab_size: int, device: torch.device) -> list[Group]:
    """Rows by strategy, so that none pays for what another asks."""
    found: dict[int, dict[int, Controls]] = {}
    for row, one in controls.items():
        if one.top_k >= vocab_size:
            one = replace(one, top_k=0)
        found.setdefault(_width(one, vocab_size), {})[row] = one
    return [Group(members, width, vocab_size, device) for width, members in sorted(found.items())]


def _width(controls: Controls, vocab_size: int) -> int:
    """Candidates that will do for nearly every row; depends on the row's own controls alone."""
    if controls.top_k:
        needed = controls.top_k + max(_ROOM_FOR_TIES, controls.top_k // 4)
    elif controls.min_p > 0 or controls.top_p < 1:
        needed = _WIDTH_WITHOUT_TOP_K
    else:
        return 0
    # half the vocabulary as candidates would save nothing
    return next((min(width, vocab_size) for width in _WIDTHS if needed <= width), 0)


@dataclass(slots=True)
class _Candidates:
    """The highest logits of some rows, by falling logit and rising id.

    Attributes:
        values: float32 ``[R, n]``.
        ids: int64 ``[R, n]``.
        weights: float64 ``[R, n]``; 0 where min-p or top-k leave a token out.
        complete: bool ``[R, 1]``; whether no token beyond the candidates has a weight.
    """

    values: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    complete: torch.Tensor


class _Drawing:
    """One call of `draw`."""

    def __init__(
        self, logits: torch.Tensor, maxima: torch.Tensor, uniforms: Mapping[int, float], wanted: AbstractSet[int]
    ) -> None:
        self._logits = logits
        self._maxima = maxima
        self._uniforms = uniforms
        self._wanted = wanted
        self.token_ids: dict[int, int] = {}
        self.distributions: dict[int, torch.Tensor] = {}

    @cached_property
    def _row(self) -> torch.Tensor:
        """One row of weights, filled up to whole blocks; a fresh one per row would cost more than the weighing."""
        width = num_blocks(self._logits.shape[1]) * BLOCK
        return torch.zeros(width, dtype=torch.float64, device=self._logits.device)

    def draw(self, group: Group) -> None:
        if not group.width:
            for row in group.rows:
                self._draw_whole(row, group.controls[row])
            return
        found = self._candidates(group)
        # cumsum adds in order; what sum does depends on the number of rows
        targets = None if group.top_p is None else group.top_p * found.weights.cumsum(-1)[:, -1:]
        done: set[int] = set()
        if not bool(found.complete.all()):
            targets, done = self._settle_incomplete(group, found, targets)
        self._draw_candidates(group, found, targets, done)

    def _candidates(self, group: Group) -> _Candidates:
        every = len(group.rows) == len(self._logits)
        maxima = self._maxima if every else self._maxima.index_select(0, group.index)
        values, ids = top_in_order(self._logits, group.width, maxima, None if every else group.index)
        weights = (values.double() - values[:, :1].double()).div_(group.temperature).exp_()
        last = values[:, -1:]
        complete = (last == -torch.inf) if group.width < group.vocab_size else torch.ones_like(last, dtype=torch.bool)
        if group.min_p is not None:
            complete = complete | (weights[:, -1:] < group.min_p)
            weights = weights * (weights >= group.min_p)
        if group.last is not None:
            lowest = values.gather(1, group.last)
            complete = complete | (lowest > last)
            weights = weights * (values >= lowest)
        return _Candidates(values, ids, weights, complete)

    def _settle_incomplete(
        self, group: Group, found: _Candidates, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, set[int]]:
        """Rows of which more than the candidates has a weight: masses for those whose prefix ends among them all the
        same, tokens for the others. Returns the masses to be reached, and which places in the group have a token."""
        sure = (found.weights * (found.values > found.values[:, -1:])).cumsum(-1)[:, -1].tolist()
        done: set[int] = set()
        for place, complete in enumerate(found.complete[:, 0].tolist()):
            if complete:
                continue
            row = group.rows[place]
            controls = group.controls[row]
            lowest = None if not controls.top_k else found.values[place, min(controls.top_k, group.width) - 1]
            weights = self._weigh(row, controls, lowest)
            if controls.top_p < 1:
                target = controls.top_p * self._block_sums().sum()
                if sure[place] >= float(target):
                    assert targets is not None
                    targets[place] = target
                    continue
                weights *= prefix_of_mass(self._logits[row], weights, float(target)).contains(self._logits[row])
            self._draw_from_row(row)
            done.add(place)
        return targets, done

    def _draw_candidates(
        self, group: Group, found: _Candidates, targets: torch.Tensor | None, done: AbstractSet[int]
    ) -> None:
        weights = found.weights
        if targets is not None:
            before = torch.nn.functional.pad(weights.cumsum(-1)[:, :-1], (1, 0))
            weights = weights * (before < targets)
        ids, order = sort_ids(found.ids)
        cumulative = weights.gather(1, order).cumsum_(-1)
        numbers = torch.tensor([self._uniforms[row] for row in group.rows], dtype=torch.float64, device=weights.device)
        places = _invert(cumulative, numbers[:, None])
        token_ids = ids.gather(1, places)[:, 0].tolist()
        for place, row in enumerate(group.rows):
            if place not in done:
                self.token_ids[row] = token_ids[place]
                if row in self._wanted:
                    spread = torch.zeros(group.vocab_size, dtype=torch.float64, device=weights.device)
                    self.distributions[row] = spread.scatter_(0, found.ids[place], weights[place]).log_()

    def _draw_whole(self, row: int, controls: Controls) -> None:
        logits = self._logits[row]
        lowest = logits.topk(controls.top_k).values[-1] if controls.top_k else None
        weights = self._weigh(row, controls, lowest)
        if controls.top_p < 1:
            target = controls.top_p * float(self._block_sums().sum())
            weights *= prefix_of_mass(logits, weights, target).contains(logits)
        self._draw_from_row(row)

    def _weigh(self, row: int, controls: Controls, lowest: torch.Tensor | None) -> torch.Tensor:
        """Weights of the whole row, float64 ``[V]``: a view of the one row that there is room for."""
        logits = self._logits[row]
        weights = self._row[: len(logits)]
        weights.copy_(logits).sub_(self._maxima[row].amax().double()).div_(controls.temperature).exp_()
        if lowest is not None:
            weights *= logits >= lowest
        if controls.min_p > 0:
            weights *= weights >= controls.min_p
        return weights

    def _block_sums(self) -> torch.Tensor:
        return self._row.view(-1, BLOCK).sum(-1)

    def _draw_from_row(self, row: int) -> None:
        """Inverts the cumulative weights of `_row`: first of its blocks, then of the tokens of one block."""
        cumulative = self._block_sums().cumsum_(0)
        number = torch.tensor([self._uniforms[row]], dtype=torch.float64, device=cumulative.device)
        block = int(_invert(cumulative, number))
        before = cumulative[block - 1] if block else cumulative.new_zeros(())
        inside = self._row[block * BLOCK : (block + 1) * BLOCK].cumsum(0)
        place = _first_above(inside, (number * cumulative[-1] - before).clamp_(min=0))
        self.token_ids[row] = block * BLOCK + int(place)
        if row in self._wanted:
            self.distributions[row] = self._row[: self._logits.shape[1]].log()


def _invert(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where the cumulative weights ``[..., n]`` first exceed a part ``[..., 1]`` in [0, 1] of their total."""
    return _first_above(cumulative, uniforms * cumulative[..., -1:])


def _first_above(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """First place whose cumulative weight exceeds the target. Rounding may not lead past the last with a weight."""
    below = torch.nextafter(cumulative[..., -1:], torch.zeros_like(targets))
    return torch.searchsorted(cumulative, torch.minimum(targets, below), right=True)
