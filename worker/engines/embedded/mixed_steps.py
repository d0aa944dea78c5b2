"""Prices of prompt tokens beside decode rows, learnt from the steps of an engine."""

from __future__ import annotations

from worker.engines.embedded.plan import Plan

FIRST_CHUNK = 16
"""Prompt tokens beside decode rows while nothing is known of what they cost."""

MEASURED_AFTER = (2, 256)
"""Steps with prompts after which one without them is measured again: twice as many each time, from
the first number, for a step that was held up, to the last, since contexts grow.
"""

_ASKED = 4
"""Steps without prompts that are asked for in a row; prompts go on though none of them was learnt.
"""

_NEAR = 2
"""Quotient of two numbers of rows up to which one's step tells what the other's takes."""

_SLOWER = 0.1
"""Weight of a step that took longer than is known. A faster one is taken as it is: what else the
machine does can only make a step slower.
"""

_KEPT = 0.9
"""Part of what was learnt of prompt tokens that is kept with each step: the last ten count."""

_GROWTH = 2
"""Most prompt tokens of a step, in units of those of the steps before: what is learnt of few says
little about many.
"""


class MixedSteps:
    """Prices of prompt tokens beside decode rows, in times of a step that only decodes.

    It asks for a step to measure where it does not know. What drafted tokens cost is learnt by
    `speculation.draft_length.StepCosts`, which guesses there.
    """

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}  # seconds of steps that only decode, by their rows
        self._num_mixed = 0  # steps with prompts since the last of these
        self._measured_after = MEASURED_AFTER[0]
        self._num_asked = 0  # times in a row that a step without prompts was asked for
        self._seconds = self._tokens = self._steps = 0.0  # sums over the last mixed steps

    def learn(self, plan: Plan, seconds: float) -> None:
        """Take the time of a step that decodes."""
        rows = len(plan.decode)
        if plan.chunks:
            self.learn_mixed(rows, plan.num_tokens - plan.num_decode_tokens, seconds)
        elif plan.companions is None or not plan.companions.chunks:
            self.learn_decode(rows, seconds)

    def learn_decode(self, rows: int, seconds: float) -> None:
        """Take the time of a step of so many rows, whatever is drafted behind them."""
        is_new = self._without_prompts(rows) is None
        known = self._decode.get(rows, seconds)
        self._decode[rows] = min(seconds, known + _SLOWER * (seconds - known))
        if is_new:
            self._measured_after = MEASURED_AFTER[0]
        elif self._num_mixed:
            self._measured_after = min(2 * self._measured_after, MEASURED_AFTER[1])
        self._num_mixed = self._num_asked = 0

    def learn_mixed(self, rows: int, tokens: int, seconds: float) -> None:
        """Take the time of a step of so many rows and prompt tokens."""
        self._num_mixed += 1
        self._seconds = _KEPT * self._seconds + max(0.0, seconds - (self._without_prompts(rows) or 0.0))
        self._tokens = _KEPT * self._tokens + tokens
        self._steps = _KEPT * self._steps + 1

    def tokens(self, rows: int, share: float) -> int:
        """Prompt tokens that make a step of so many rows longer by `share` of its time without.

        At least 1, but 0 where it is not known what a step takes without them: then the next one is
        to be measured.
        """
        without_s = self._without_prompts(rows)
        if self._num_asked < _ASKED and (self._num_mixed >= self._measured_after or without_s is None):
            self._num_asked += 1
            return 0
        most = max(FIRST_CHUNK, int(_GROWTH * self._tokens / self._steps)) if self._steps else FIRST_CHUNK
        if without_s is None or share * without_s * self._tokens >= most * self._seconds:
            return most
        return max(1, int(share * without_s * self._tokens / self._seconds))

    def _without_prompts(self, rows: int) -> float | None:
        """Seconds of a step of about so many rows; None if none was measured."""
        nearest = min(self._decode, key=lambda one: abs(one - rows), default=0)
        return self._decode[nearest] if rows <= _NEAR * nearest <= _NEAR**2 * rows else None
