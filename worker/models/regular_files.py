"""Files that others name: a pipe would block its reader, and a device has no end."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "Not a regular file")
    return open(number, "rb")


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()
