"""The watchdog ends the process when a step hangs: its requests migrate, as when a worker dies."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from worker.engines.embedded.host.beats import Beats, open_beats

T = TypeVar("T")

EXIT_STATUS = 1
"""Exit status after a hung step, as of every broken engine."""

MAX_PERIOD_S = 1.0
"""Longest time between two checks."""

_STDERR = 2


class Watchdog:
    """Watches the steps of one engine; those of a process share the thread that does so.

    Ending the process uses nothing that a hung thread might hold: no lock, no logger, no event
    loop; and no interpreter, where a step never releases the GIL (`beats`). Time in which the
    process was stopped, as by SIGSTOP, does not count.

    Args:
        timeout_s: Seconds after which a step counts as hung; the process ends at most two periods
            later.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.period_s = min(MAX_PERIOD_S, timeout_s / 4)
        self._began: tuple[float, float] | None = None  # of the step: the time, and what of it did not count by then

    @property
    def is_busy(self) -> bool:
        """Whether a step is in progress."""
        return self._began is not None

    def start(self) -> None:
        """Start watching."""
        _checks.add(self)

    def stop(self) -> None:
        """Stop it. Idempotent, and safe without `start`."""
        _checks.remove(self)

    def is_hung(self) -> bool:
        """Whether a step has taken longer than it may."""
        began = self._began
        return began is not None and monotonic() - began[0] - (_checks.lost_s - began[1]) > self.timeout_s

    def watch(self, step: Callable[[], T]) -> T:
        """Call `step` and return its result; the process ends if it does not return in time."""
        self._began = monotonic(), _checks.lost_s
        _checks.begin_step()
        try:
            return step()
        finally:
            self._began = None


class Checks:
    """Checks all watchdogs of the process every now and then, from a thread of its own.

    Attributes:
        lost_s: Time in which that thread could not run, since the process was stopped or starved.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._lock = threading.Lock()
        self._watchdogs: tuple[Watchdog, ...] = ()
        self._beats: Beats | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watchdog: Watchdog) -> None:
        """Check it from now on."""
        with self._lock:
            self._watchdogs += (watchdog,)
            if self._thread is None:
                self._stopped, self._beats = threading.Event(), open_beats(EXIT_STATUS)
                self._beat()
                self._thread = threading.Thread(target=self._run, name="embedded-watchdog", daemon=True)
                self._thread.start()

    def remove(self, watchdog: Watchdog) -> None:
        """Check it no longer; the thread ends with the last one."""
        with self._lock:
            self._watchdogs = tuple(one for one in self._watchdogs if one is not watchdog)
            if not self._watchdogs and self._thread is not None:
                self._stopped.set()
                self._thread.join()
                self._thread = self._beats = None

    def begin_step(self) -> None:
        """A step begins."""
        if self._beats is not None:
            self._beats.begin_step()

    @property
    def period_s(self) -> float:
        """Time between two checks."""
        return min((one.period_s for one in self._watchdogs), default=MAX_PERIOD_S)

    def _run(self) -> None:
        last, stopped, beats = monotonic(), self._stopped, self._beats
        assert beats is not None
        while not stopped.wait(period := self.period_s):
            now = monotonic()
            if now - last > 2 * period:
                self.lost_s += now - last - period
            last = now
            for one in self._watchdogs:
                if one.is_hung():
                    _end(one)
            self._beat()
        beats.end()

    def _beat(self) -> None:
        watchdogs = self._watchdogs
        if self._beats is not None and watchdogs:
            limit_s = min(one.timeout_s for one in watchdogs) + self.period_s
            self._beats.beat(limit_s, self.period_s, any(one.is_busy for one in watchdogs))


_checks = Checks()


def _reset_checks() -> None:
    global _checks
    _checks = Checks()


os.register_at_fork(after_in_child=_reset_checks)  # threads stay with the parent


def _end(watchdog: Watchdog) -> None:
    text = f"worker: error: engine broken: a step has taken more than {watchdog.timeout_s:g} s\n"
    with contextlib.suppress(OSError):  # its disk is full, or its reader has gone
        os.write(_STDERR, text.encode())
        faulthandler.dump_traceback(file=_STDERR)
    os._exit(EXIT_STATUS)
