"""Bodies of uploads, which go to the disk as they come: memory has no room for them.

An upload is written in the event loop, which the kernel's page cache takes in well under a
millisecond; it is brought to the disk for good, in a thread, once it is kept.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from worker.frontdoor.bodies import WINDOW_S, Room
from worker.frontdoor.errors import Refused

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Uploads of the largest size that are on the disk at a time, until they are kept or refused."""

RATE = 64 * 1024
"""Bytes per second that an upload must have come at on the whole, once its first time is over."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Uploads:
    """Room for all uploads under way.

    Args:
        directory: Place in which they are written.
        largest: Bytes of the largest body.
        least_rate: Bytes per second of an upload in any `WINDOW_S`.
        timeout_s: Seconds that each upload has, beside those at `RATE`.
        now: The clock.
    """

    def __init__(
        self, directory: Path, largest: int, least_rate: float, timeout_s: float, now: Callable[[], float]
    ) -> None:
        self.directory = directory
        self.largest = largest
        self.least_rate = least_rate
        self.timeout_s = timeout_s
        self.now = now
        self.room = Room(AT_ONCE * largest, now)

    def begin(self, too_slow: Callable[[Refused], None]) -> Upload:
        """An upload of which nothing has come; ``too_slow`` ends its request to make room.

        Raises:
            Refused: 507, the disk has no room; 500, it has an error.
        """
        return Upload(self, too_slow)


class Upload:
    """One upload, as a file; a body such as `Body`.

    Args:
        uploads: The room for it.
        too_slow: Ends its request.

    Attributes:
        path: File that its bytes are written to, which `free` deletes.
    """

    def __init__(self, uploads: Uploads, too_slow: Callable[[Refused], None]) -> None:
        self._uploads = uploads
        self.too_slow = too_slow
        self.path = uploads.directory / secrets.token_hex(16)
        self._file: int | None = None
        with errors_of_the_disk():
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.begun_s = uploads.now()
        self._mark = (self.begun_s, 0)  # when it had got on, and how far
        self.num_bytes = 0
        self.is_complete = False

    def add(self, part: bytes) -> None:
        """Take the next bytes.

        Raises:
            Refused: 507, the disk has no room; 500, it has an error; 503, too many uploads come,
                all of them faster.
        """
        assert self._file is not None
        rest = memoryview(part)
        with errors_of_the_disk():
            while rest:
                rest = rest[os.write(self._file, rest) :]
        self.num_bytes += len(part)
        self._uploads.room.grow(self, len(part))

    def take(self) -> bytes:
        """No bytes: all of them are in the file, which is complete."""
        self.is_complete = True
        self._close()
        return b""

    def hold(self) -> None:
        """Stay on the disk until `free`, in the room that it has."""

    def free(self) -> None:
        """Give its room back, and delete the file. Idempotent."""
        self._close()
        self._uploads.room.shrink(self, self.num_bytes)
        self.num_bytes = 0
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def left_s(self) -> float:
        """Seconds until it counts as too slow, unless more of it comes."""
        uploads, now = self._uploads, self._uploads.now()
        if self.num_bytes - self._mark[1] >= uploads.least_rate * WINDOW_S:
            self._mark = (now, self.num_bytes)
        end_s = self.begun_s + uploads.timeout_s + self.num_bytes / RATE
        return max(0.0, min(end_s, self._mark[0] + WINDOW_S) - now)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def unwritable(error: Exception) -> Refused:
    """The refusal of a request for which the disk, or the database, has no room, or an error."""
    logger.warning("files and batches cannot be written: %s", error)
    is_full = isinstance(error, OSError) and error.errno in _FULL
    if is_full or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        problem = "the server's disk has no room for files and batches"
        return Refused(507, problem, kind="server_error", code="insufficient_storage")
    problem = "the server's disk does not take files and batches; its log says why"
    return Refused(500, problem, kind="server_error", code="storage_failed")


@contextlib.contextmanager
def errors_of_the_disk(refusal: Callable[[Exception], Refused] = unwritable) -> Iterator[None]:
    """Errors of the disk, or of the database, as a refusal of the one request that met them."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise refusal(error) from None
