"""The database of files and batches: SQLite in a directory that one process uses at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from worker.errors import StartupError

VERSION = 2
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
    input_tokens INTEGER DEFAULT 0,
    cached_tokens INTEGER DEFAULT 0,
    output_tokens INTEGER DEFAULT 0,
    reasoning_tokens INTEGER DEFAULT 0,
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

_COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_FROM_1 = "".join(f"ALTER TABLE batches ADD COLUMN {name} INTEGER DEFAULT 0;" for name in _COUNTS) + (
    f"UPDATE batches SET {', '.join(f'{name} = NULL' for name in _COUNTS)};"  # of what ran before nothing is known
)
_NAME = "batches.sqlite"


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
            raise unusable(directory, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.connection = _opened(directory / _NAME)
        except BlockingIOError:
            os.close(self._lock)
            raise StartupError(f"--batch-dir {directory}: another front door uses it") from None
        except (OSError, sqlite3.Error, ValueError) as error:
            os.close(self._lock)
            raise unusable(directory, error) from None

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


def sql_list(texts: Sequence[str]) -> str:
    """A list of texts for SQL; none of them has a quotation mark."""
    return "('" + "', '".join(texts) + "')"


def unusable(directory: Path, error: Exception) -> StartupError:
    """The error of a directory that the disk, or what is in it, keeps from being used."""
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        problem = f"{_NAME} is damaged ({error}); restore the directory from a backup, or move it away to begin anew"
        return StartupError(f"--batch-dir {directory}: {problem}")
    return StartupError(f"--batch-dir {directory}: {error}")


def _opened(path: Path) -> sqlite3.Connection:
    """The database in ``path``.

    Raises:
        ValueError: its version is not known, or its tables are not those of this worker.
        sqlite3.DatabaseError: it is damaged.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # prompts are nobody else's to read
    os.close(descriptor)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        (damage,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        _bring_up_to_date(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Make the tables, or change those of an earlier version. Raises `ValueError`."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    changes = {0: "" if _columns(connection) else _TABLES, 1: _FROM_1, VERSION: ""}
    if version not in changes:
        raise ValueError(f"{_NAME} has tables of version {version}, and this worker knows {VERSION}")
    if changes[version]:
        connection.executescript(f"BEGIN; {changes[version]} PRAGMA user_version = {VERSION}; COMMIT;")
    with contextlib.closing(sqlite3.connect(":memory:")) as own:
        own.executescript(_TABLES)
        if _columns(connection) != _columns(own):
            raise ValueError(f"{_NAME} has other tables than those of this worker; name another directory")


def _columns(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Each table with the name of each of its columns."""
    rows = connection.execute(
        "SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns"
        " WHERE tables.type = 'table'"
    )
    return {(table, column) for table, column in rows}
