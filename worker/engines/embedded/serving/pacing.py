"""Pacing: how long decoding waits for consumers that are behind, and for requests that arrive."""

from __future__ import annotations

import math
import time

from worker.engines.embedded.queues import Queues

MAX_PAUSE_S = 0.01
"""Longest that a step is held back for consumers, so that those that hang slow decoding but
never stop it.
"""

GATHER_S = 0.001
"""Time for which decoding waits after an arrival for the next one, whose prompt is computed at
once. So requests that come together start together, and their first tokens do not queue behind the
many tokens of a fast model."""

BURST_S = 0.005
"""The same after a request that came as soon as that after another: as long as first tokens need
to be on their way.
"""

MAX_GATHER_S = 0.03
"""Longest that decoding waits while requests keep coming. It does so only after the engine was
idle: who has decoded for longer is not to wait, and prompts share the steps of those who decode.
"""


class Pacing:
    """Decides when the step thread decodes, and when it computes prompts alone.

    Attributes:
        is_held: Whether consumers are behind, so that decoding pauses; set by any thread.
    """

    def __init__(self) -> None:
        self.is_held = False
        self._has_arrivals = False  # since the last step
        self._last_decode_s = -math.inf
        self._last_arrival_s = -math.inf
        self._gathering_since_s = -math.inf
        self._quiet_s = GATHER_S  # time without an arrival after which decoding continues

    @property
    def is_prompts_first(self) -> bool:
        """Whether the next step leaves decode rows out if there are prompt tokens to compute."""
        return self._is_pausing() or self._is_gathering()

    def wait_s(self, queues: Queues) -> float:
        """Seconds to wait for a message before the next step, where there is one to compute."""
        if self._is_gathering() and not (queues.prefilling or queues.waiting):
            return max(0.0, self._last_arrival_s + self._quiet_s - time.monotonic())
        if self._is_pausing() and not (queues.prefilling or self._has_arrivals):
            return max(0.0, self._last_decode_s + MAX_PAUSE_S - time.monotonic())
        return 0.0

    def note_arrival(self, *, is_idle: bool) -> None:
        """A request has arrived; `is_idle` if there was nothing to compute before."""
        now_s = time.monotonic()
        self._quiet_s = BURST_S if now_s - self._last_arrival_s <= self._quiet_s else GATHER_S
        if is_idle:
            self._gathering_since_s = now_s
        self._last_arrival_s = now_s
        self._has_arrivals = True

    def note_step(self, *, prompts_first: bool) -> None:
        """A step has been computed."""
        self._has_arrivals = False
        if not prompts_first:
            self._last_decode_s = time.monotonic()

    def _is_pausing(self) -> bool:
        """Whether decoding waits for consumers."""
        return self.is_held and time.monotonic() - self._last_decode_s < MAX_PAUSE_S

    def _is_gathering(self) -> bool:
        """Whether requests are coming in one after the other."""
        now_s = time.monotonic()
        return now_s - self._last_arrival_s < self._quiet_s and now_s - self._gathering_since_s < MAX_GATHER_S
