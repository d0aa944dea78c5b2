"""Directories that do not outlive their worker for long, even one that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

OWNER = "owner"
"""File in a directory that its worker has locked for as long as it lives."""


class OwnedDirectory:
    """A new directory, which its user alone can read.

    Directories of workers that were killed are removed first: nobody holds their locks.

    Args:
        prefix: Beginning of the names of all directories of its kind.
        root: Place of it, None for that of temporary files.

    Attributes:
        path: The directory.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        remove_abandoned(root, prefix)
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        try:
            self._lock = os.open(made / OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            made.rmdir()
            raise
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = root / made.name.removeprefix(".")
        made.rename(self.path)  # only now do others look at it

    def close(self) -> None:
        """Remove it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(root: Path, prefix: str) -> None:
    """Remove the directories of a kind below ``root`` whose workers have ended."""
    for directory in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or being removed by another worker
            lock = os.open(directory / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
