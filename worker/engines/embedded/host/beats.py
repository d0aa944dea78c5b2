"""The watch that ends the process when a thread keeps the interpreter to itself."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import signal
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Protocol

_SHOWS_STACKS = signal.SIGVTALRM
_STDERR = 2


class Beats(Protocol):
    """Must beat, or the process ends; one watch per process."""

    def beat(self, limit_s: float, period_s: float, is_busy: bool) -> None:
        """Wait for the next beat from now on.

        Args:
            limit_s: Seconds within which it must come.
            period_s: Seconds after which it will likely come.
            is_busy: Whether a step is in progress.
        """

    def begin_step(self) -> None:
        """A step begins: called for each."""

    def end(self) -> None:
        """No beat will come any more."""


def open_beats(status: int) -> Beats:
    """The watch of this process, which ends with `status`."""
    suffixes = (Path(__file__).with_name(f"beats_thread{suffix}") for suffix in EXTENSION_SUFFIXES)
    path = next((path for path in suffixes if path.is_file()), None)
    if path is None:
        return TimedBeats()
    try:
        return NativeBeats(ctypes.CDLL(str(path)), status)
    except OSError:  # built for another machine
        return TimedBeats()


class _Watched(ctypes.Structure):
    """``beats_t`` of ``beats_thread.c``."""

    _fields_ = (
        ("beats", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("period_ns", ctypes.c_int64),
        ("is_over", ctypes.c_int64),
    )


class NativeBeats:
    """Implements `Beats` in a thread that runs no Python, and counts no time in which the process
    was stopped.
    """

    def __init__(self, library: ctypes.CDLL, status: int) -> None:
        self._library = library
        self._status = status
        self._watched = _Watched()
        self._thread = threading.Thread(target=self._run, name="embedded-beats", daemon=True)

    def beat(self, limit_s: float, period_s: float, is_busy: bool) -> None:
        """See `Beats.beat`."""
        self._watched.limit_ns = int(limit_s * 1e9)
        self._watched.period_ns = int(period_s * 1e9)
        self._watched.beats += 1
        if not self._thread.is_alive():
            faulthandler.register(_SHOWS_STACKS, file=_STDERR)
            atexit.register(self.end)
            self._thread.start()

    def begin_step(self) -> None:
        """Does nothing: every moment is watched."""

    def end(self) -> None:
        """See `Beats.end`; does not wait for the thread, which ends after its period."""
        self._watched.is_over = 1
        atexit.unregister(self.end)

    def _run(self) -> None:
        self._library.watch_beats(ctypes.byref(self._watched), ctypes.c_int32(_SHOWS_STACKS), self._status)


class TimedBeats:
    """Implements `Beats` with the timer of `faulthandler`, where there was no compiler.

    The timer's clock runs while the process is stopped, so it is set only while there are steps: an
    idle worker may be stopped for any time, a busy one only for less than its time-out.
    """

    def __init__(self) -> None:
        self._limit_s = 0.0
        self._is_set = False

    def beat(self, limit_s: float, period_s: float, is_busy: bool) -> None:
        """See `Beats.beat`."""
        self._limit_s = limit_s
        if is_busy:
            self._set()
        elif self._is_set:
            self.end()

    def begin_step(self) -> None:
        """See `Beats.begin_step`."""
        if not self._is_set and self._limit_s:
            self._set()

    def end(self) -> None:
        """See `Beats.end`."""
        self._is_set = False
        faulthandler.cancel_dump_traceback_later()

    def _set(self) -> None:
        self._is_set = True
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=_STDERR)
