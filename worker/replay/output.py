"""Standard output of a command whose exit status says what it has found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from worker.errors import ConfigurationError


@contextmanager
def standard_output() -> Iterator[None]:
    """Lets what is printed within be cut off by a reader that has read enough.

    Raises:
        ConfigurationError: it cannot be written, as on a full disk.
    """
    try:
        yield
        if sys.stdout is not None:  # as where the command was started without one
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        _discard()
    except OSError as error:
        _discard()
        raise ConfigurationError(f"standard output: {error.strerror}") from None


def _discard() -> None:
    """Let go of what Python would try to write once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
