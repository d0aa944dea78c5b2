"""Number of tokens to draft: as many as give the most tokens per second."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from math import inf, nan

_FASTER, _SLOWER = 0.5, 0.1
"""Weight of a step's time in the average of steps of as many tokens, where it is below and above
it: what else the machine does can only make a step slower.
"""

_COST_UNKNOWN = 0.05
"""Expected cost of one more token until it is measured, as a part of a step of few tokens."""

_LOST = 16
"""Tokens that are tried beyond the best number: time grows in stairs, by the rows of a tile."""


class StepCosts:
    """Seconds that a step takes, by the number of its tokens; learnt from steps without prompts.

    It tells what more drafted tokens would cost, so that it is optimistic about numbers that nobody
    has tried. `mixed_steps.MixedSteps` has the time by rows, whatever is drafted behind them.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: list[int] = []
        self._lowest: list[float] = []  # of each count and all above it: no step is faster for being larger

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a step."""
        known, index = self._seconds.get(num_tokens), bisect_left(self._counts, num_tokens)
        if known is None:
            self._seconds[num_tokens] = seconds
            self._counts.insert(index, num_tokens)
            self._lowest.insert(index, nan)
        else:
            self._seconds[num_tokens] += (_FASTER if seconds < known else _SLOWER) * (seconds - known)
        lowest = self._lowest[index + 1] if index + 1 < len(self._lowest) else inf
        for place in range(index, -1, -1):
            lowest = min(lowest, self._seconds[self._counts[place]])
            if lowest == self._lowest[place]:
                break  # so are those below
            self._lowest[place] = lowest

    def seconds(self, num_tokens: int) -> float:
        """Time of a step of so many tokens, interpolated; 0 while nothing is known.

        Outside what is known a step is expected to be fast, so that it is tried: below the smallest
        number in proportion to its tokens, and above the largest a token costs little.
        """
        if not self._counts:
            return 0.0
        index = bisect_left(self._counts, num_tokens)
        if index == len(self._counts):
            most = self._counts[-1]
            return self._lowest[-1] * (1 + min(_COST_UNKNOWN, 0.5 / most) * (num_tokens - most))
        above, slower = self._counts[index], self._lowest[index]
        below, faster = (self._counts[index - 1], self._lowest[index - 1]) if index else (0, 0.0)
        return faster + (num_tokens - below) / (above - below) * (slower - faster)


def draft_lengths(
    rates: Sequence[float],
    limits: Sequence[int],
    num_tokens: int,
    costs: StepCosts,
    weights: Sequence[int] | None = None,
) -> list[int]:
    """Tokens to draft for each of some rows of a step: those that give the most tokens per second.

    The k-th token of a draft is sampled with probability ``rate ** k``. Of all tokens that may be
    drafted the most likely ones are taken, as many as make the quotient of the expected tokens and
    the time of the step the highest. After the goodput of Liu et al. 2024 (arXiv:2406.14066), with
    a length of its own for each row. The tokens of prompts count as much as those of answers:
    beside them next to nothing is drafted.

    Args:
        rates: Probability that each row's next drafted token is accepted.
        limits: Most tokens to draft for each row.
        num_tokens: Tokens of the step without drafts.
        costs: Step times of this engine.
        weights: Tokens that each row's drafted token makes a step longer by; 1 by default.
    """
    weights = weights or [1] * len(rates)
    highest, expected = num_tokens / (costs.seconds(num_tokens) or 1.0), float(num_tokens)
    order: list[int] = []  # the row of each token, the most likely first
    taken = num_drafted = 0
    heap = [(-rate, row) for row, (rate, limit) in enumerate(zip(rates, limits, strict=True)) if rate and limit]
    heapify(heap)
    lengths = [0] * len(rates)
    while heap and len(order) < taken + _LOST:
        probability, row = heap[0]
        order.append(row)
        expected -= probability
        num_drafted += weights[row]
        lengths[row] += 1
        if lengths[row] < limits[row]:
            heapreplace(heap, (probability * rates[row], row))
        else:
            heappop(heap)
        speed = expected / (costs.seconds(num_tokens + num_drafted) or 1.0)
        if speed > highest:
            highest, taken = speed, len(order)
    counts = Counter(order[:taken])
    return [counts[row] for row in range(len(rates))]


def can_pay(num_tokens: int, costs: StepCosts) -> bool:
    """Whether drafts that are certain to be accepted would pay beside `num_tokens` tokens."""
    return any(draft_lengths([1.0], [_LOST], num_tokens, costs))
