"""A boundary store in a directory: for workers of one machine, or of a shared file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from worker.errors import StartupError
from worker.migration.store import TTL_S, StoreError

T = TypeVar("T")

NUM_THREADS = 4
"""For file operations, which must not hold up the event loop: they may go over a network."""

_OURS = re.compile(r"[0-9a-f]+(\.[0-9a-f-]+)?")
"""Names of records, and of those that are being written."""


class FileStore:
    """One file per record, written aside and renamed; its age is the time since it was written.

    Nothing is synchronised to the disk: the records need to survive processes, not the machine.

    Args:
        directory: Made when the store is opened.
        ttl_s: Seconds after which a record goes away.
        clock: Seconds since 1970, as the file system's times.
    """

    def __init__(self, directory: str, ttl_s: float = TTL_S, clock: Callable[[], float] = time.time) -> None:
        self.address = f"file:{directory}"
        self._directory = Path(directory)
        self._ttl_s = ttl_s
        self._clock = clock
        self._swept_s = clock()
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
            with path.open("rb") as file:
                is_old = os.fstat(file.fileno()).st_mtime < self._clock() - self._ttl_s
                return None if is_old else file.read()
        except FileNotFoundError:
            os.stat(self._directory)  # without it nothing can be said of the record
            return None

    def _write(self, path: Path, value: bytes) -> None:
        aside = path.with_name(f"{path.name}.{os.getpid()}-{id(value):x}")
        try:
            aside.write_bytes(value)
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        if self._clock() - self._swept_s > self._ttl_s / 2:
            self._swept_s = self._clock()
            self._sweep()

    def _sweep(self) -> None:
        latest = self._clock() - self._ttl_s
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another worker sweeps too
                    if _OURS.fullmatch(entry.name) and entry.stat().st_mtime < latest:
                        os.unlink(entry)
