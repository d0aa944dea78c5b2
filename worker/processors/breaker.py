"""A circuit breaker per third-party processor: one that keeps failing is refused for a while."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from worker.errors import ProcessorUnavailable

logger = logging.getLogger(__name__)


class Breaker:
    """Counts failures by processor. Built-ins never trip it: their failures come from requests.

    Args:
        names: Third-party processors.
        limit: Failures within ``window_s`` that open the breaker.
        window_s: Seconds over which failures are counted.
        rest_s: Seconds for which requests that name the processor are refused; then one failure
            opens it again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        limit: int = 5,
        window_s: float = 60.0,
        rest_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit, self.window_s, self.rest_s = limit, window_s, rest_s
        self._clock = clock
        self._failures: dict[str, deque[float]] = {name: deque(maxlen=limit) for name in names}
        self._open_until: dict[str, float] = {}

    def counts(self, name: str) -> bool:
        """Whether failures of ``name`` are counted: it is a third party's."""
        return name in self._failures

    def record(self, name: str) -> bool:
        """Count one failure of ``name``; whether that opened its breaker."""
        times = self._failures.get(name)
        if times is None:
            return False
        now = self._clock()
        on_probation = name in self._open_until
        times.append(now)
        if not on_probation and not (len(times) == self.limit and now - times[0] <= self.window_s):
            return False
        self._open_until[name] = now + self.rest_s
        logger.warning("logits processor %s has failed too often: refused for %g s", name, self.rest_s)
        return True

    def check(self, names: Iterable[str]) -> None:
        """Let a request pass that uses ``names``.

        Raises:
            ProcessorUnavailable: the breaker of one of them is open.
        """
        for name in names:
            until = self._open_until.get(name)
            if until is None:
                continue
            wait = until - self._clock()
            if wait > 0:
                raise ProcessorUnavailable(name, wait)

    def record_success(self, names: Iterable[str]) -> None:
        """A request that used ``names`` ended well: those whose rest is over are trusted again."""
        for name in names:
            until = self._open_until.get(name)
            if until is not None and until <= self._clock():
                del self._open_until[name]
                self._failures[name].clear()

    def open_names(self) -> list[str]:
        """Processors that requests may not name now; any thread may ask, while metrics are read."""
        now = self._clock()
        return sorted(name for name, until in self._open_until.copy().items() if until > now)
