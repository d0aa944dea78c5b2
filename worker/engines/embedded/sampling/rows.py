"""Rows of a batch grouped by their sampling controls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from adapters.chain import Planned
from adapters.contract import SAMPLE, uniform, uniform_rows
from adapters.contract.random_numbers import SAMPLE_AGAIN
from adapters.processors.truncation import Temperature
from adapters.sampling.truncation import GREEDY_BELOW, log_of
from worker.engines.embedded.native.drawing import ControlColumns
from worker.engines.embedded.plan import Request
from worker.engines.embedded.sampling.truncation import Controls, Group, group_rows
from worker.sampling import SamplingParams

_LARGE = GREEDY_BELOW * float(np.finfo(np.float32).max)
"""Logits that no temperature takes out of float32 are below this."""

_MANY_ROWS = 20
"""Rows whose random numbers numpy computes faster than Python's integers."""

_GREEDY = Controls(temperature=0.0)


class RowTable:
    """Sampling metadata of a batch; made once per set of rows, not once per step.

    Args:
        requests: The sampled requests.
        offsets: Rows ``offsets[i]`` to ``offsets[i + 1]`` are request i's, at consecutive
            positions; one row each by default.
        vocab_size: Width of a row.

    Attributes:
        owners: Request of each row, and number of the request's rows before it.
        greedy: Rows that take the argmax.
        random: Rows that sample randomly; `controls` has the temperature and truncation of each.
        raw: Rows with raw log probabilities.
        processed: Rows whose processed log probabilities are needed.
        attributed: Rows of `processed` of which only the sampled token's is; their requests report
            raw ones.
        trained: Rows of `attributed` that report all that `TokenLogprob` has.
        logprob_counts: n of each row's top-n log probabilities.

    Raises:
        ValueError: the offsets do not start at 0, fall, or do not fit the requests.
    """

    def __init__(self, requests: tuple[Request, ...], offsets: Sequence[int] | None, vocab_size: int) -> None:
        self.requests = requests
        self.offsets = offsets
        self.vocab_size = vocab_size
        owners = _owners(len(requests), offsets)
        self.owners = [(requests[owner], depth) for owner, depth in owners]
        params = [request.params for request, _ in self.owners]
        self.logprob_counts = [one.logprobs or 0 for one in params]
        is_greedy = [one.is_greedy for one in params]
        self.greedy = [row for row, greedy in enumerate(is_greedy) if greedy]
        self.random = [row for row, greedy in enumerate(is_greedy) if not greedy]
        self._seeds = [self.owners[row][0].seed for row in self.random]
        self._choices = [self.owners[row][0].choice for row in self.random]
        logprobs = [row for row, one in enumerate(params) if one.logprobs is not None]
        self.raw = [row for row in logprobs if params[row].logprobs_mode != "processed"]
        self.trained = [row for row in self.raw if params[row].logprobs_mode == "train"]
        attributed = {row for row in self.raw if _is_attributed(self.owners[row][0])}
        self.attributed = frozenset(attributed.union(self.trained))
        self.processed = [row for row in logprobs if row not in self.raw or row in self.attributed]
        self.controls = {row: controls_of(params[row]) for row in self.random}

    def is_for(self, requests: tuple[Request, ...], offsets: Sequence[int] | None) -> bool:
        """Whether the table was made from these very objects."""
        return self.requests is requests and self.offsets is offsets

    def counts(self, rows: Sequence[int], attributed: frozenset[int]) -> list[int]:
        """n of the top-n log probabilities of each of `rows`, 0 for the `attributed` ones."""
        return [0 if row in attributed else self.logprob_counts[row] for row in rows]

    @cached_property
    def raw_index(self) -> torch.Tensor:
        """`raw`, int64 ``[n]``."""
        return torch.tensor(self.raw, dtype=torch.int64)

    @cached_property
    def trained_of_raw(self) -> torch.Tensor:
        """Indices of `trained` in `raw`, int64 ``[n]``."""
        return torch.tensor([self.raw.index(row) for row in self.trained])

    def temperatures(self, planned: Sequence[Planned]) -> list[float]:
        """Temperature of each row of `trained`: the sampler's, and those of its chain's processors
        that act at this step; 1 of a greedy row.
        """
        late = {row: plan.late for row, _, plan in planned}
        found = []
        for row in self.trained:
            temperature = self.controls[row].divisor if row in self.controls else 1.0
            acting = [one.processor.value for one in late.get(row, ()) if isinstance(one.processor, Temperature)]
            is_greedy = row not in self.controls or any(value < GREEDY_BELOW for value in acting)
            found.append(1.0 if is_greedy else math.prod(acting, start=temperature))
        return found

    @cached_property
    def greedy_index(self) -> torch.Tensor:
        """`greedy`, int64 ``[n]``."""
        return torch.tensor(self.greedy, dtype=torch.int64)

    @cached_property
    def processed_counts(self) -> dict[int, int]:
        """The n of the top-n of each of `processed`, 0 of the `attributed` ones."""
        return dict(zip(self.processed, self.counts(self.processed, self.attributed), strict=True))

    @cached_property
    def drawn_counts(self) -> list[int] | None:
        """`processed_counts` of every row, -1 where nothing is wanted; None if it is of none."""
        counts = self.processed_counts
        return [counts.get(row, -1) for row in range(len(self.owners))] if counts else None

    @cached_property
    def groups(self) -> list[Group]:
        """The randomly sampled rows, grouped by the candidates that they need."""
        return group_rows(self.controls, self.vocab_size)

    @cached_property
    def columns(self) -> ControlColumns:
        """Controls of all rows."""
        every = [self.controls.get(row, _GREEDY) for row in range(len(self.owners))]
        return ControlColumns(
            torch.tensor([one.divisor for one in every], dtype=torch.float32),
            torch.tensor([log_of(one.min_p) for one in every], dtype=torch.float64),
            torch.tensor([min(one.top_k, self.vocab_size) for one in every], dtype=torch.int64),
            torch.tensor([one.share for one in every], dtype=torch.float64),
        )

    def uniforms(self) -> dict[int, float]:
        """This step's random number of each randomly sampled row."""
        owners = [self.owners[row] for row in self.random]
        positions = [len(request.tokens) + depth for request, depth in owners]
        purposes = [
            SAMPLE + SAMPLE_AGAIN * request.chain.num_ruled_out if request.chain is not None and not depth else SAMPLE
            for request, depth in owners
        ]
        words = (self._seeds, self._choices, positions, purposes)
        few = len(owners) < _MANY_ROWS
        numbers = list(map(uniform, *words)) if few else uniform_rows(*words).tolist()
        return dict(zip(self.random, numbers, strict=True))

    def divided(self, highest: list[float]) -> list[float]:
        """The highest logit of each row, divided by its temperature; infinite beyond float32."""
        if all(abs(value) < _LARGE for value in highest):
            return highest
        found = np.array(highest, dtype=np.float32)
        with np.errstate(over="ignore"):
            for row, controls in self.controls.items():
                found[row] /= np.float32(controls.divisor)
        return list(map(float, found))


def controls_of(params: SamplingParams) -> Controls:
    """Temperature and truncation of a request that is not greedy; what it does not set is off."""
    given = {name: getattr(params, name) for name in Controls.__dataclass_fields__}
    return Controls(**{name: value for name, value in given.items() if value is not None})


def _owners(count: int, offsets: Sequence[int] | None) -> list[tuple[int, int]]:
    """Request of each row, and number of the request's rows before it."""
    if offsets is None:
        return [(request, 0) for request in range(count)]
    falls = any(stop < start for start, stop in pairwise(offsets))
    if len(offsets) != count + 1 or offsets[0] != 0 or falls:
        raise ValueError(f"offsets must be {count + 1} rising numbers from 0, got {list(offsets)}")
    return [(request, depth) for request in range(count) for depth in range(offsets[request + 1] - offsets[request])]


def _is_attributed(request: Request) -> bool:
    return request.chain is not None and request.chain.receipt.attribution
