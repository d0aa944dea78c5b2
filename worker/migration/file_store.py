"""A boundary store in a directory: for workers of one machine, or of a shared file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from worker.errors import StartupError
from worker.migration.store import TTL_S, StoreError

T = TypeVar("T")

NUM_THREADS = 4
"""Threads for file operations: these may go over a network, and must not block the event loop."""

_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+)?")
"""Names of records, and of those that are being written: keys are 128 bits."""

MAX_BYTES = 64 * 2**10
"""Bytes of a record at most; it has some hundreds."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileStore:
    """One file per record, written aside and renamed; links are not followed.

    Nothing is synchronised to the disk: the records need to survive processes, not the machine.
    A record goes away once this process has seen it unchanged for its time to live, by a
    monotonic clock: the file system's times, and those of other machines, only tell whether it was
    written again.

    Args:
        directory: Made when the store is opened.
        ttl_s: Seconds after which a record goes away, at the earliest.
        clock: Monotonic, seconds.
    """

    def __init__(self, directory: str, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = f"file:{directory}"
        self._directory = Path(directory)
        self._ttl_s = ttl_s
        self._clock = clock
        self._swept_s = clock()
        self._seen: dict[str, tuple[int, float]] = {}  # time of the last change, and when it was first seen
        self._sweeping = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="boundary-store")

    async def open(self) -> None:
        """Make the directory, for this user alone; see `BoundaryStore.open`."""
        try:
            await self._run(self._make)
        except StoreError as error:
            raise StartupError(f"--boundary-store {error}") from None

    async def get(self, key: str) -> bytes | None:
        """See `BoundaryStore.get`."""
        return await self._run(lambda: self._read(self._directory / key))

    async def put(self, key: str, value: bytes) -> None:
        """See `BoundaryStore.put`. Now and then, files that are too old are removed."""
        await self._run(lambda: self._write(self._directory / key, value))

    async def delete(self, key: str) -> None:
        """See `BoundaryStore.delete`."""
        await self._run(lambda: (self._directory / key).unlink(missing_ok=True))

    async def close(self) -> None:
        """See `BoundaryStore.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except OSError as error:
            raise StoreError(f"{self.address}: {error.strerror or error}") from None
        except RuntimeError:  # the threads have been shut down
            raise StoreError(f"{self.address}: it is closed") from None

    def _make(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(self._directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(0, "it cannot be read and written")

    def _read(self, path: Path) -> bytes | None:
        try:
            number = os.open(path, _OLD)
        except FileNotFoundError:
            os.stat(self._directory)  # without it nothing can be said of the record
            return None
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OSError(0, "a record is no file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise OSError(0, f"a record is larger than {MAX_BYTES} bytes")
        return data

    def _write(self, path: Path, value: bytes) -> None:
        aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with open(os.open(aside, _NEW, 0o600), "wb") as file:
                file.write(value)
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        if self._clock() - self._swept_s > self._ttl_s / 2 and self._sweeping.acquire(blocking=False):
            try:
                self._swept_s = self._clock()
                with contextlib.suppress(OSError):  # the record is written: the next sweep may see the directory
                    self._sweep()
            finally:
                self._sweeping.release()

    def _sweep(self) -> None:
        now_s, seen = self._clock(), dict[str, tuple[int, float]]()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if not _OURS.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):  # another worker sweeps too, or it is not ours to remove
                    changed_ns = entry.stat(follow_symlinks=False).st_mtime_ns
                    known = self._seen.get(entry.name)
                    since_s = known[1] if known is not None and known[0] == changed_ns else now_s
                    if now_s - since_s > self._ttl_s:
                        os.unlink(entry)
                    else:
                        seen[entry.name] = changed_ns, since_s
        self._seen = seen
