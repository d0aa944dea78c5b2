"""Files that others name: a pipe would block its reader, and a device has no end."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return open(number, "rb")


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


@contextmanager
def unchanged(paths: Iterable[Path]) -> Iterator[None]:
    """Reads regular files that belong together, in one state of all.

    Raises:
        OSError: one cannot be opened, or was written to or replaced while they were read.
    """
    before = {path: _state(path) for path in paths}
    yield
    for path, state in before.items():
        if _state(path) != state:
            raise OSError(errno.EBUSY, "It has changed while it was read", str(path))


def _state(path: Path) -> tuple[int, int, int]:
    with open_regular(path) as file:  # a network's file system looks again when it opens one
        found = os.fstat(file.fileno())
    return found.st_size, found.st_ino, found.st_mtime_ns
