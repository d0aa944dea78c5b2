"""The outbox: outputs on their way from the step thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from worker.engines.embedded.plan import Output
from worker.engines.embedded.serving.pacing import Pacing

RUN_AHEAD = 16
"""Tokens of all requests together that may wait for their consumers, and steps that may wait for
the event loop. A model faster than its consumers would otherwise take processor and interpreter
from the threads that send chunks."""

MIN_AHEAD = 2
"""Tokens of each request that may wait all the same: one step is computed while another is
consumed.
"""


class Outbox:
    """Hands outputs over; while the loop is behind they collect here, and it is not woken again.

    Args:
        loop: The event loop of the callers.
        deliver: Called on `loop` with outputs, oldest first.
        pacing: Held once `RUN_AHEAD` steps wait for the loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[Output]], None], pacing: Pacing
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._pacing = pacing
        self._outputs: list[Output] = []
        self._lock = threading.Lock()
        self._num_ahead = 0  # steps published since the loop last collected

    def publish(self, outputs: list[Output]) -> None:
        """Hand over the outputs of a step."""
        if not outputs:
            return
        with self._lock:
            waiting = bool(self._outputs)
            self._outputs += outputs
            self._num_ahead += 1
            if self._num_ahead >= RUN_AHEAD:
                self._pacing.is_held = True
        if not waiting:
            self.call_soon(self._collect)

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call `callback` on the loop; not if the loop is closed, which has no caller left."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _collect(self) -> None:
        with self._lock:
            outputs, self._outputs = self._outputs, []
            self._num_ahead = 0
        self._deliver(outputs)
