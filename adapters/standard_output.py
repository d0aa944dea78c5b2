"""Standard output of commands, whose readers may have read enough."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def may_be_cut_off() -> Iterator[None]:
    """Lets what is printed within be cut off by a reader that has read enough, as ``head`` does.

    Characters that the output's encoding lacks are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:  # as where the command was started without one
            sys.stdout.flush()
    except BrokenPipeError:
        discard()


def write(text: str) -> None:
    """Print `text` as it is, where there is a standard output; its reader may have read enough.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    with may_be_cut_off():
        if sys.stdout is not None:
            sys.stdout.write(text)


def discard() -> None:
    """Let go of what Python would try to write once more at its exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
