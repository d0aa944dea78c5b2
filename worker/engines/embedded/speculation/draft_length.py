"""How many tokens to draft: as many as are likely to save more time than they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MEMORY = 0.9
"""Weight of what was counted before a step, against that step."""

_SMOOTHING = 0.2
"""Weight of a step's time in the average of steps of as many tokens."""

_COST_UNKNOWN = 0.05
"""What a token more is expected to cost, as a part of the step, until it has been measured."""

_PROBE_AFTER = 32
"""Steps without a draft after which one token is drafted all the same, to see whether it pays."""


@dataclass(slots=True)
class Acceptance:
    """How likely a drafted token is accepted where those before it were: a decaying average.

    Attributes:
        accepted: Drafted tokens that were accepted, decayed.
        tried: Those that were compared with a sampled one, decayed.
        num_idle: Steps since the last draft.
    """

    accepted: float
    tried: float
    num_idle: int = 0

    @property
    def rate(self) -> float:
        """Between 0 and 1."""
        return self.accepted / self.tried

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Take the result of a draft; tokens behind the first rejected one were not tried."""
        self.num_idle = 0
        self.accepted = _MEMORY * self.accepted + num_accepted
        self.tried = _MEMORY * self.tried + min(num_drafted, num_accepted + 1)


class StepCosts:
    """Seconds that a step takes, by the number of its tokens; learnt from steps without prompts."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a step."""
        known = self._seconds.get(num_tokens)
        self._seconds[num_tokens] = seconds if known is None else known + _SMOOTHING * (seconds - known)

    def per_token(self, num_tokens: int, more: int) -> float:
        """Cost of each of `more` tokens beside `num_tokens`, as a part of the step without them."""
        before, after = self._at(num_tokens), self._at(num_tokens + more)
        if before is None or after is None or before <= 0:
            return _COST_UNKNOWN
        return max(0.0, after / before - 1) / more

    def _at(self, num_tokens: int) -> float | None:
        """Interpolated; beyond the largest known number, `_COST_UNKNOWN` of it for each token."""
        below = max((one for one in self._seconds if one <= num_tokens), default=None)
        above = min((one for one in self._seconds if one >= num_tokens), default=None)
        if below is None:
            return None
        if above is None:
            return self._seconds[below] * (1 + _COST_UNKNOWN * (num_tokens - below))
        if above == below:
            return self._seconds[below]
        part = (num_tokens - below) / (above - below)
        return self._seconds[below] + part * (self._seconds[above] - self._seconds[below])


def draft_lengths(rates: Sequence[float], limits: Sequence[int], num_tokens: int, costs: StepCosts) -> list[int]:
    """Tokens to draft for each of some rows of a step.

    The k-th token of a draft is sampled with probability ``rate ** k``. Without drafts a step that
    only decodes gives as many tokens as it computes, so a further one pays while that probability
    exceeds its cost, as a part of the step, times their number. Beside the tokens of prompts next
    to nothing is drafted.

    Args:
        rates: `Acceptance.rate` of each row that may draft.
        limits: Its most tokens.
        num_tokens: Tokens of the step without drafts.
        costs: Of this engine.
    """
    wanted = list(limits)
    for _ in range(2):  # the cost of a token depends on how many there are
        if not any(wanted):
            break
        threshold = num_tokens * costs.per_token(num_tokens, sum(wanted))
        wanted = [_longest(rate, limit, threshold) for rate, limit in zip(rates, limits, strict=True)]
    return wanted


def can_pay(num_tokens: int, costs: StepCosts) -> bool:
    """Whether a draft that is certain to be accepted would pay beside `num_tokens` tokens."""
    return num_tokens * costs.per_token(num_tokens, 1) < 1


def _longest(rate: float, limit: int, threshold: float) -> int:
    count, probability = 0, rate
    while count < limit and probability > threshold:
        count, probability = count + 1, probability * rate
    return count


def wants_probe(acceptance: Acceptance) -> bool:
    """Whether a row that drafts nothing should draft a token after all; counts its steps."""
    acceptance.num_idle += 1
    return acceptance.num_idle > _PROBE_AFTER
