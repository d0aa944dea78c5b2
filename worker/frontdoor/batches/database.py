"""The database of files and batches: SQLite in a directory that one process uses at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from worker.errors import StartupError

VERSION = 1
"""Version of the tables, in SQLite's ``user_version``."""

_TABLES = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE INDEX files_of_owner ON files (owner, number);
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT,
    output_lifetime_s INTEGER NOT NULL,
    status TEXT NOT NULL,
    model TEXT,
    errors TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER
);
CREATE INDEX batches_of_owner ON batches (owner, number);
CREATE INDEX batches_by_status ON batches (status, number);
CREATE INDEX batches_by_input ON batches (input_file_id);
CREATE TABLE results (
    batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    line INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    status_code INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
"""


class Database:
    """A connection to the database, for one thread at a time.

    Args:
        directory: Directory of the database and its lock; made if it is missing.

    Attributes:
        connection: SQLite's connection; each change is a `transaction`.

    Raises:
        StartupError: the directory cannot be used, another process uses it, or a newer version of
            this worker has written it.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"--batch-dir {directory}: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.connection = _opened(directory / "batches.sqlite")
        except BlockingIOError:
            os.close(self._lock)
            raise StartupError(f"--batch-dir {directory}: another front door uses it") from None
        except (OSError, sqlite3.Error, ValueError) as error:
            os.close(self._lock)
            raise StartupError(f"--batch-dir {directory}: {error}") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Changes that are all on the disk afterwards, or none of them; one within another is part
        of the outer one.
        """
        if self.connection.in_transaction:
            yield self.connection
            return
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:  # SQLite ends it itself for some errors
                self.connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Give the directory back."""
        self.connection.close()
        os.close(self._lock)


def _opened(path: Path) -> sqlite3.Connection:
    """The database in ``path``. Raises `ValueError` if its version is not known."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # prompts are nobody else's to read
    os.close(descriptor)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise ValueError(f"its tables have version {version}, and this worker knows {VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection
