"""Directories of sockets that do not outlive their worker for long, even one that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "dlw-vllm-"
OWNER = "owner"
"""File in a directory that its worker has locked for as long as it lives."""


class SocketDirectory:
    """A new directory below that of temporary files, which its user alone can read.

    Directories of workers that were killed are removed first: nobody holds their locks.

    Attributes:
        path: The directory.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        remove_abandoned(root)
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
        self._lock = os.open(made / OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = root / made.name.removeprefix(".")
        made.rename(self.path)  # only now do others look at it

    def close(self) -> None:
        """Remove it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(root: Path) -> None:
    """Remove the directories below ``root`` whose workers have ended."""
    for directory in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or being removed by another worker
            lock = os.open(directory / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
