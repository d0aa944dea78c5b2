"""The watchdog ends the process when a step hangs: its requests migrate, as when a worker dies."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

EXIT_STATUS = 1
"""Exit status after a hung step, as of every broken engine."""

MAX_PERIOD_S = 1.0
"""Longest time between two checks."""

_STDERR = 2


class Watchdog:
    """Watches the steps of one thread from a thread of its own.

    Ending the process uses nothing that a hung thread might hold: no lock, no logger, no event
    loop. A step that never releases the GIL is ended by `faulthandler`, whose timer needs no GIL
    and of which a process has only one.

    Args:
        timeout_s: Seconds after which a step counts as hung; the process ends at most two periods
            later.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.period_s = min(MAX_PERIOD_S, timeout_s / 4)
        self._began: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded-watchdog", daemon=True)

    def start(self) -> None:
        """Start the watchdog's thread."""
        self._reset_timer()
        self._thread.start()

    def stop(self) -> None:
        """Stop it. Idempotent, and safe without `start`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def is_hung(self) -> bool:
        """Whether a step has taken longer than it may."""
        began = self._began
        return began is not None and monotonic() - began > self.timeout_s

    def watch(self, step: Callable[[], T]) -> T:
        """Call `step` and return its result; the process ends if it does not return in time."""
        self._began = monotonic()
        try:
            return step()
        finally:
            self._began = None

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.period_s):
                if self.is_hung():
                    self._end()
                self._reset_timer()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _reset_timer(self) -> None:
        """Without another call the process ends: then no Python thread runs any more."""
        faulthandler.dump_traceback_later(self.timeout_s + self.period_s, exit=True, file=_STDERR)

    def _end(self) -> None:
        os.write(_STDERR, f"worker: error: engine broken: a step has taken more than {self.timeout_s:g} s\n".encode())
        faulthandler.dump_traceback(file=_STDERR)
        os._exit(EXIT_STATUS)
