"""Logits to tokens, in the order law: the chains' edits, then temperature, truncation and the draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from adapters.batch import Planned, apply_edits, apply_late
from adapters.draws import SAMPLE, uniform
from worker.engines.embedded.logprobs import token_logprobs
from worker.engines.embedded.plan import Edits, Plan, Request, Samples
from worker.engines.embedded.truncation import Truncation, draw, weigh

_UNSATISFIABLE = "unsatisfiable: the request's controls leave no token that may be sampled"
_NOT_FINITE = "the row of logits holds NaN or +inf"


class RowTable:
    """Which rows of a batch need which treatment; made once per set of rows, not once per step.

    Args:
        requests: The sampled requests, by row.
        vocab_size: Width of a row.
        device: Where logits are.
    """

    def __init__(self, requests: tuple[Request, ...], vocab_size: int, device: torch.device) -> None:
        self.requests = requests
        self.random = _rows(requests, lambda request: not request.params.is_greedy)
        logprobs = _rows(requests, lambda request: request.params.logprobs is not None)
        self.raw = [row for row in logprobs if requests[row].params.logprobs_mode == "raw"]
        self.processed_logprobs = [row for row in logprobs if requests[row].params.logprobs_mode == "processed"]
        chosen = [requests[row] for row in self.random]
        self.random_index = torch.tensor(self.random, dtype=torch.long, device=device)
        self.truncation = _truncation(chosen, vocab_size, device)


def _rows(requests: tuple[Request, ...], wanted: Callable[[Request], bool]) -> list[int]:
    return [row for row, request in enumerate(requests) if wanted(request)]


def _truncation(requests: list[Request], vocab_size: int, device: torch.device) -> Truncation:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    params = [request.params for request in requests]
    temperature = [1.0 if one.temperature is None else one.temperature for one in params]
    min_p = [one.min_p or 0.0 for one in params]
    top_k = [min(one.top_k or vocab_size, vocab_size) for one in params]
    top_p = [1.0 if one.top_p is None else one.top_p for one in params]
    return Truncation(
        column(temperature, torch.float64),
        column(min_p, torch.float64) if any(min_p) else None,
        column(top_k, torch.int64) if any(value < vocab_size for value in top_k) else None,
        column(top_p, torch.float64) if any(value < 1 for value in top_p) else None,
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
        self._table = RowTable((), vocab_size, device)

    def sample(self, logits: torch.Tensor, edits: Edits, plan: Plan) -> Samples:
        """Tokens for ``plan.sampled``; `logits` ``[n, V]`` is edited in place if it is float32."""
        if not plan.sampled:
            return Samples([])
        if self._table.requests is not plan.sampled:
            self._table = RowTable(plan.sampled, self._vocab_size, self._device)
        table = self._table
        logits = logits.float()
        self._mask_never(logits)
        raw = logits[table.raw] if table.raw else None
        errors = {row: str(failure) for row, failure in edits.failures.items()}
        if edits.planned:
            self._apply_chains(logits, edits.planned, errors)
        samples = self._choose(logits, table, edits.planned, errors)
        if raw is not None:
            _attach_logprobs(samples, raw, table.requests, table.raw)
        return samples

    def _apply_chains(self, logits: torch.Tensor, planned: list[Planned], errors: dict[int, str]) -> None:
        for apply in (apply_edits, apply_late):
            errors |= {row: str(failure) for row, failure in apply(logits, planned).items()}
        self._mask_never(logits)  # a shaping processor may have written there

    def _mask_never(self, logits: torch.Tensor) -> None:
        if isinstance(self._never, slice):
            logits[:, self._never] = -torch.inf
        elif self._never is not None:
            logits.index_fill_(-1, self._never, -torch.inf)

    def _choose(self, logits: torch.Tensor, table: RowTable, planned: list[Planned], errors: dict[int, str]) -> Samples:
        highest = logits.amax(-1)
        token_ids = logits.argmax(-1) if len(table.random) < len(table.requests) else None
        adjusted = None
        if table.random:
            adjusted, drawn = self._draw(logits, table)
            token_ids = drawn if token_ids is None else token_ids.index_copy_(0, table.random_index, drawn)
        assert token_ids is not None
        if not bool(highest.isfinite().all()):
            errors |= _unfit(highest.tolist(), planned, errors)
        samples = Samples(token_ids.tolist(), errors)
        forced = self._force(logits, samples, planned)
        if table.processed_logprobs:
            final = logits.double()
            if adjusted is not None:
                final.index_copy_(0, table.random_index, adjusted)
            for row, token_id in forced.items():
                final[row] = -torch.inf
                final[row, token_id] = 0.0
            _attach_logprobs(samples, final[table.processed_logprobs], table.requests, table.processed_logprobs)
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

    def _draw(self, logits: torch.Tensor, table: RowTable) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [table.requests[row] for row in table.random]
        numbers = [uniform(request.seed, 0, len(request.tokens), SAMPLE) for request in chosen]
        rows = logits if len(table.random) == len(table.requests) else logits.index_select(0, table.random_index)
        adjusted, weights = weigh(rows, table.truncation)
        return adjusted, draw(weights, torch.tensor(numbers, dtype=torch.float64, device=self._device))


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


def _never(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> slice | torch.Tensor | None:
    """Ids as an index; padding is a tail nearly always, and a slice is much cheaper to fill."""
    if not ids:
        return None
    if ids == tuple(range(ids[0], vocab_size)):
        return slice(ids[0], vocab_size)
    return torch.tensor(ids, device=device)


def _attach_logprobs(samples: Samples, logits: torch.Tensor, requests: tuple[Request, ...], rows: list[int]) -> None:
    counts = [requests[row].params.logprobs or 0 for row in rows]
    found = token_logprobs(logits, [samples.token_ids[row] for row in rows], counts)
    samples.logprobs |= dict(zip(rows, found, strict=True))
