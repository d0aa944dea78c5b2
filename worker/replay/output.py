"""Standard output of a command whose exit status says what it has found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapters.standard_output import discard, may_be_cut_off
from worker.errors import ConfigurationError


@contextmanager
def standard_output() -> Iterator[None]:
    """Lets what is printed within be cut off by a reader that has read enough.

    Raises:
        ConfigurationError: it cannot be written, as on a full disk.
    """
    try:
        with may_be_cut_off():
            yield
    except OSError as error:
        discard()
        raise ConfigurationError(f"standard output: {error.strerror}") from None
