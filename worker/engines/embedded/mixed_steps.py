"""What prompt tokens cost beside decode rows, learnt from the steps of an engine."""

from __future__ import annotations

from worker.engines.embedded.plan import Plan
from worker.engines.embedded.speculation.draft_length import StepCosts

FIRST_CHUNK = 16
"""Prompt tokens beside decode rows while nothing is known of what they cost."""

REMEASURED = 256
"""Steps with prompts after which one without them is measured again: contexts grow, and machines
become slower and faster.
"""

_ASKED = 4
"""Steps without prompts that are asked for in a row; prompts go on though none of them was learnt.
"""

_NEAR = 2
"""Quotient of two numbers of rows up to which one's step tells what the other's takes."""

_KEPT = 0.9
"""Part of what was learnt of prompt tokens that is kept with each step: the last ten count."""

_GROWTH = 2
"""Most prompt tokens of a step, in units of those of the steps before: what is learnt of few says
little about many.
"""


class MixedSteps:
    """What prompt tokens cost beside decode rows, in the time of a step that only decodes."""

    def __init__(self) -> None:
        self._decode = StepCosts()
        self._measured: set[int] = set()  # rows of steps that only decoded
        self._num_mixed = 0  # since the last of these
        self._num_asked = 0  # for one of these, in a row
        # Sums over the last mixed steps.
        self._seconds = self._tokens = self._steps = 0.0

    def learn(self, plan: Plan, seconds: float) -> None:
        """Take the time of a step that decodes."""
        rows = len(plan.decode)
        if plan.chunks:
            self.learn_mixed(rows, plan.num_tokens - plan.num_decode_tokens, seconds)
        elif plan.companions is None or not plan.companions.chunks:
            self.learn_decode(rows, seconds)

    def learn_decode(self, rows: int, seconds: float) -> None:
        """Take the time of a step of so many rows, whatever is drafted behind them."""
        self._decode.learn(rows, seconds)
        self._measured.add(rows)
        self._num_mixed = self._num_asked = 0

    def learn_mixed(self, rows: int, tokens: int, seconds: float) -> None:
        """Take the time of a step of so many rows and prompt tokens."""
        self._num_mixed += 1
        self._seconds = _KEPT * self._seconds + max(0.0, seconds - self._decode.seconds(rows))
        self._tokens = _KEPT * self._tokens + tokens
        self._steps = _KEPT * self._steps + 1

    def tokens(self, rows: int, share: float) -> int:
        """Prompt tokens that make a step of so many rows longer by `share` of its time without.

        At least 1, but 0 where it is not known what a step takes without them: then the next one is
        to be measured.
        """
        if self._num_asked < _ASKED and (self._num_mixed >= REMEASURED or not self._is_measured(rows)):
            self._num_asked += 1
            return 0
        most = max(FIRST_CHUNK, int(_GROWTH * self._tokens / self._steps)) if self._steps else FIRST_CHUNK
        spare_s = share * self._decode.seconds(rows)
        if spare_s * self._tokens >= most * self._seconds:
            return most
        return max(1, int(spare_s * self._tokens / self._seconds))

    def _is_measured(self, rows: int) -> bool:
        return rows in self._measured or any(rows <= _NEAR * one <= _NEAR**2 * rows for one in self._measured)
