"""Standard error of commands: lines for the operator, on which nothing depends."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Write a line, which is lost where its disk is full, its reader has gone, or the process was
    started without a standard error: the work goes on, and its exit status is its own.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
