"""Ctrl-C, which is no error of the code that it ends."""

from __future__ import annotations

import threading


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is Ctrl-C, which Python raises in the main thread alone."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
