"""Logits to tokens, in the order law: the chains' edits, then temperature, truncation and the draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from adapters.batch import Planned, apply_edits, apply_late
from adapters.candidates import block_maxima, highest_ids
from adapters.draws import SAMPLE, uniform_rows
from adapters.edits import apply_bitmask
from worker.engines.embedded.logprobs import token_logprobs
from worker.engines.embedded.plan import Edits, Plan, Request, Samples
from worker.engines.embedded.truncation import Controls, draw, group_rows
from worker.sampling import SamplingParams

_UNSATISFIABLE = "unsatisfiable: the request's controls leave no token that may be sampled"
_NARROW = 8192
"""Up to this width torch's own maximum is faster than one by blocks."""

_NOT_FINITE = "the row of logits holds NaN or +inf"


class RowTable:
    """Which rows of a batch need which treatment; made once per set of rows, not once per step.

    Args:
        requests: The sampled requests.
        offsets: Rows ``offsets[i]`` to ``offsets[i + 1]`` are request i's, at consecutive positions; one row each by
            default.
        vocab_size: Width of a row.
        device: Where logits are.

    Raises:
        ValueError: the offsets do not start at 0, fall, or do not fit the requests.
    """

    def __init__(
        self, requests: tuple[Request, ...], offsets: Sequence[int] | None, vocab_size: int, device: torch.device
    ) -> None:
        self.requests = requests
        self.offsets = offsets
        owners = _owners(len(requests), offsets)
        self.owners = [(requests[owner], depth) for owner, depth in owners]
        params = [request.params for request, _ in self.owners]
        self.logprob_counts = [one.logprobs or 0 for one in params]
        self.greedy = _rows(params, lambda one: one.is_greedy)
        self.random = _rows(params, lambda one: not one.is_greedy)
        self.seeds = [self.owners[row][0].seed for row in self.random]
        self.choices = [self.owners[row][0].choice for row in self.random]
        logprobs = _rows(params, lambda one: one.logprobs is not None)
        self.raw = [row for row in logprobs if params[row].logprobs_mode == "raw"]
        self.processed = [row for row in logprobs if params[row].logprobs_mode == "processed"]
        self.greedy_index = torch.tensor(self.greedy, dtype=torch.long, device=device)
        self.groups = group_rows({row: controls_of(params[row]) for row in self.random}, vocab_size, device)

    def is_for(self, requests: tuple[Request, ...], offsets: Sequence[int] | None) -> bool:
        """Whether these are the same objects as those that the table was made of."""
        return self.requests is requests and self.offsets is offsets

    def uniforms(self) -> dict[int, float]:
        """This step's number for each row that draws."""
        if not self.random:
            return {}
        owners = [self.owners[row] for row in self.random]
        positions = [len(request.tokens) + depth for request, depth in owners]
        numbers = uniform_rows(self.seeds, self.choices, positions, SAMPLE)
        return dict(zip(self.random, numbers.tolist(), strict=True))


def _owners(count: int, offsets: Sequence[int] | None) -> list[tuple[int, int]]:
    """Of each row: which request's it is, and how many of the request's rows come before it."""
    if offsets is None:
        return [(request, 0) for request in range(count)]
    falls = any(stop < start for start, stop in pairwise(offsets))
    if len(offsets) != count + 1 or offsets[0] != 0 or falls:
        raise ValueError(f"offsets must be {count + 1} rising numbers from 0, got {list(offsets)}")
    return [(request, depth) for request in range(count) for depth in range(offsets[request + 1] - offsets[request])]


def _rows(params: Sequence[SamplingParams], wanted: Callable[[SamplingParams], bool]) -> list[int]:
    return [row for row, one in enumerate(params) if wanted(one)]


def controls_of(params: SamplingParams) -> Controls:
    """Temperature and truncation of a request that is not greedy; what it does not set is off."""
    return Controls(
        temperature=1.0 if params.temperature is None else params.temperature,
        min_p=params.min_p or 0.0,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
    )


class Sampler:
    """Chooses a token for each row; a row's result depends on that row alone.

    Args:
        vocab_size: Width of a row.
        undecodable_ids: Ids that are never sampled.
        device: Where logits are.
    """

    def __init__(self, vocab_size: int, undecodable_ids: tuple[int, ...], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._never = _never(undecodable_ids, vocab_size, device)
        self._table = RowTable((), None, vocab_size, device)

    def sample(
        self,
        logits: torch.Tensor,
        edits: Edits,
        plan: Plan,
        offsets: Sequence[int] | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> Samples:
        """Tokens for ``plan.sampled``; `logits` ``[n, V]`` is edited in place if it is float32.

        Args:
            logits: One row per request, or as many as `offsets` say.
            edits: By row.
            plan: Its ``sampled`` requests own the rows.
            offsets: Rows ``offsets[i]`` to ``offsets[i + 1]`` are request i's, at consecutive positions from the
                length of its tokens on; a request may have none.
            bitmask: int32 ``[n, ceil(V / 32)]``, a hard mask on top of the chains'; see `adapters.edits.Allow`.

        Raises:
            ValueError: as `RowTable`, or a shape does not fit.
        """
        if not self._table.is_for(plan.sampled, offsets):
            self._table = RowTable(plan.sampled, offsets, self._vocab_size, self._device)
        table = self._table
        self._check_shapes(logits, bitmask)
        if not table.owners:
            return Samples([])
        logits = logits.float()
        self._mask_never(logits)
        raw = logits[table.raw] if table.raw else None
        errors = {row: str(failure) for row, failure in edits.failures.items()}
        if edits.planned or bitmask is not None:
            self._edit(logits, edits.planned, bitmask, errors)
        samples = self._choose(logits, table, edits.planned, errors)
        if raw is not None:
            _attach_logprobs(samples, raw, table, table.raw)
        return samples

    def _check_shapes(self, logits: torch.Tensor, bitmask: torch.Tensor | None) -> None:
        count, width = len(self._table.owners), self._vocab_size
        if tuple(logits.shape) != (count, width):
            raise ValueError(f"logits must have shape ({count}, {width}), got {tuple(logits.shape)}")
        words = -(-width // 32)
        if bitmask is not None and (tuple(bitmask.shape) != (count, words) or bitmask.dtype != torch.int32):
            found = f"{str(bitmask.dtype).removeprefix('torch.')} {tuple(bitmask.shape)}"
            raise ValueError(f"the bitmask must be int32 of shape ({count}, {words}), got {found}")

    def _edit(
        self, logits: torch.Tensor, planned: list[Planned], bitmask: torch.Tensor | None, errors: dict[int, str]
    ) -> None:
        errors |= {row: str(failure) for row, failure in apply_edits(logits, planned).items()}
        if bitmask is not None:
            apply_bitmask(logits, bitmask)
        errors |= {row: str(failure) for row, failure in apply_late(logits, planned).items()}
        self._mask_never(logits)  # a shaping processor may have written there

    def _mask_never(self, logits: torch.Tensor) -> None:
        if isinstance(self._never, slice):
            logits[:, self._never] = -torch.inf
        elif self._never is not None:
            logits.index_fill_(-1, self._never, -torch.inf)

    def _choose(self, logits: torch.Tensor, table: RowTable, planned: list[Planned], errors: dict[int, str]) -> Samples:
        plain = not (table.random or table.processed or planned)
        if plain and logits.shape[1] <= _NARROW and logits.device.type == "cpu":
            return _choose_plain(logits, errors)
        maxima = block_maxima(logits)
        groups = table.groups
        highest = maxima.amax(-1).tolist()  # NaN in a row is NaN here
        unfit = {row for row, value in enumerate(highest) if not math.isfinite(value)}
        if unfit:
            errors |= _unfit(highest, planned, errors)
            groups = [group.without(unfit) for group in groups]
        samples = Samples([0] * len(table.owners), errors)
        if table.greedy:
            _take_highest(samples, logits, maxima, table)
        drawn, distributions = draw(logits, groups, table.uniforms(), maxima, frozenset(table.processed))
        for row, token_id in drawn.items():
            samples.token_ids[row] = token_id
        forced = self._force(logits, samples, planned)
        if table.processed:
            final = logits[table.processed].double()
            for place, row in enumerate(table.processed):
                if row in distributions:
                    final[place] = distributions[row]
                if row in forced:
                    final[place] = -torch.inf
                    final[place, forced[row]] = 0.0
            _attach_logprobs(samples, final, table, table.processed)
        return samples

    def _force(self, logits: torch.Tensor, samples: Samples, planned: list[Planned]) -> dict[int, int]:
        """Override the sampled ids; returns the forced id by row. One that this engine never samples is an error."""
        rows = [(row, chain, plan) for row, chain, plan in planned if plan.force is not None]
        rows = [one for one in rows if one[0] not in samples.errors]
        forced = {row: plan.force for row, _, plan in rows if plan.force is not None}
        if not forced:
            return forced
        values = logits[list(forced), list(forced.values())].tolist()
        for (row, chain, plan), value in zip(rows, values, strict=True):
            if value == -math.inf:
                name = plan.forced_by.name if plan.forced_by is not None else "model"
                message = f"forces token {plan.force}, which this model never samples, at position {chain.position}"
                samples.errors[row] = str(chain.fail(name, "unsatisfiable", message))
                del forced[row]
            else:
                samples.token_ids[row] = forced[row]
        return forced


def _unfit(highest: list[float], planned: list[Planned], known: dict[int, str]) -> dict[int, str]:
    """Why nothing can be drawn from a row, for the rows that are not in `known`; their chains hear of it."""
    chains = {row: chain for row, chain, _ in planned}
    errors: dict[int, str] = {}
    for row, value in enumerate(highest):
        if math.isfinite(value) or row in known:
            continue
        if value == -math.inf and row in chains:
            errors[row] = str(chains[row].no_token_left())
        else:
            errors[row] = _UNSATISFIABLE if value == -math.inf else _NOT_FINITE
    return errors


def _take_highest(samples: Samples, logits: torch.Tensor, maxima: torch.Tensor, table: RowTable) -> None:
    if not table.random:
        samples.token_ids = highest_ids(logits, maxima).tolist()
        return
    token_ids = highest_ids(logits, maxima.index_select(0, table.greedy_index), table.greedy_index).tolist()
    for row, token_id in zip(table.greedy, token_ids, strict=True):
        samples.token_ids[row] = token_id


def _choose_plain(logits: torch.Tensor, errors: dict[int, str]) -> Samples:
    """The same for narrow rows that are all greedy and have no chain: one operation, whose ties are the lowest id."""
    highest, ids = logits.max(-1)
    values = highest.tolist()
    if not all(map(math.isfinite, values)):
        errors |= _unfit(values, [], errors)
    return Samples(ids.tolist(), errors)


def _never(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> slice | torch.Tensor | None:
    """Ids as an index; padding is a tail nearly always, and a slice is much cheaper to fill."""
    if not ids:
        return None
    if ids == tuple(range(ids[0], vocab_size)):
        return slice(ids[0], vocab_size)
    return torch.tensor(ids, device=device)


def _attach_logprobs(samples: Samples, logits: torch.Tensor, table: RowTable, rows: list[int]) -> None:
    counts = [table.logprob_counts[row] for row in rows]
    found = token_logprobs(logits, [samples.token_ids[row] for row in rows], counts)
    samples.logprobs |= dict(zip(rows, found, strict=True))
