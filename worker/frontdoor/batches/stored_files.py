"""Files of clients: a row in the database, and the content beside it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from worker.frontdoor.batches.database import Database, sql_list
from worker.frontdoor.batches.objects import INPUT, UNFINISHED, Page, StoredFile, file_of
from worker.frontdoor.batches.requests import Listing
from worker.frontdoor.errors import Refused
from worker.frontdoor.values import printable

_OWN = re.compile(r"file-[0-9a-f]{24}|[0-9a-f]{32}(\.[a-z]+)?")
"""Names of files that are made here: contents, and what has not come to its place."""

_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
"""SQLite's codes for a write that the disk has no room for, or a quota does not allow."""

SMALLEST = 4096
"""Bytes that each file counts for at least: a file of one byte takes a block, and a row."""


class StoredFiles:
    """The files of all clients.

    Content is on the disk before its row is, and the row is gone before the content, so that each
    row has its content, but for one that could not be deleted on a full disk; content without a row
    is deleted by `sweep`.

    Args:
        database: Database with the rows.
        directory: Place of the contents.
        capacity: Bytes of all files together, beyond which uploads are refused.
        now: The clock, in seconds since the epoch.
    """

    def __init__(self, database: Database, directory: Path, capacity: int, now: Callable[[], float]) -> None:
        self._database = database
        self._directory = directory
        self._capacity = capacity
        self._now = now
        self.incoming = directory / "incoming"
        for each in (directory, self.incoming):
            each.mkdir(exist_ok=True, mode=0o700)

    def add(self, owner: str, filename: str, purpose: str, content: Path, lifetime_s: int) -> StoredFile:
        """Keep a file.

        Args:
            owner: Label of its client.
            filename: Name that the client gives it.
            purpose: See `StoredFile`.
            content: File in `incoming`, which moves to its place.
            lifetime_s: Seconds until it expires.

        Raises:
            Refused: 413, uploads have used up the capacity.
        """
        size = content.stat().st_size
        now = int(self._now())
        file_id = f"file-{secrets.token_hex(12)}"
        try:
            with self._database.transaction() as connection:
                if purpose == INPUT:
                    self.check_room(max(size, SMALLEST), "file")
                added = connection.execute(
                    "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING *",
                    (file_id, owner, filename, purpose, size, now, now + lifetime_s),
                ).fetchone()
                _sync(content)
                os.replace(content, self.path(file_id))
                _sync(self._directory)
        except BaseException:  # on a full disk the row mostly, which is written last: nobody would delete the content
            with contextlib.suppress(OSError):
                self.path(file_id).unlink(missing_ok=True)
            raise
        return file_of(added)

    def check_room(self, size: int, field: str) -> None:
        """Raises `Refused` (413), about a field, if there is no room for so many bytes more."""
        if self.num_bytes() + size > self._capacity:
            problem = f"all files together have more than {self._capacity} bytes; delete files that are not needed"
            raise Refused(413, problem, field, code="storage_full")

    def get(self, owner: str, file_id: str, *, field: str = "id") -> StoredFile:
        """A file of ``owner``.

        Args:
            owner: Label of the client.
            file_id: Id of the file.
            field: Field of the request that has the id, which the refusal names.

        Raises:
            Refused: 404, the client has no file of this id.
        """
        row = self._database.connection.execute(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND expires_at > ?", (file_id, owner, int(self._now()))
        ).fetchone()
        if row is None:
            raise Refused(404, f"there is no file {printable(file_id)}", field, code="file_not_found")
        return file_of(row)

    def page(self, owner: str, listing: Listing) -> Page[StoredFile]:
        """A part of the files of ``owner``, in order of creation.

        Raises:
            Refused: 400, there is no file ``after``.
        """
        connection, now = self._database.connection, int(self._now())
        after, limit, purpose, number = listing.after, listing.limit, listing.purpose, None
        if after is not None:
            row = connection.execute("SELECT number FROM files WHERE id = ? AND owner = ?", (after, owner)).fetchone()
            if row is None:
                raise Refused(400, f"after: there is no file {printable(after)}", "after")
            number = row["number"]
        sign, order = ("<", "DESC") if listing.descending else (">", "ASC")
        rows = connection.execute(
            f"SELECT * FROM files WHERE owner = ? AND expires_at > ? AND (? IS NULL OR number {sign} ?)"
            f" AND (? IS NULL OR purpose = ?) ORDER BY number {order} LIMIT ?",
            (owner, now, number, number, purpose, purpose, limit + 1),
        ).fetchall()
        return Page([file_of(row) for row in rows[:limit]], len(rows) > limit)

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file of ``owner``. On a full disk its content makes the room that its row needs
        to go; a row that stays even so can be deleted again.

        Raises:
            Refused: 404, there is none of this id; 400, an unfinished batch reads it.
        """
        try:
            self._delete_row(owner, file_id)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in _NO_ROOM:
                raise
            self.path(file_id).unlink(missing_ok=True)
            self._delete_row(owner, file_id)
        self.path(file_id).unlink(missing_ok=True)

    def _delete_row(self, owner: str, file_id: str) -> None:
        with self._database.transaction() as connection:
            self.get(owner, file_id)
            reader = connection.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {sql_list(UNFINISHED)}", (file_id,)
            ).fetchone()
            if reader is not None:
                problem = f"{file_id} is the input of {reader['id']}, which has not ended; cancel the batch first"
                raise Refused(400, problem, "id", code="file_in_use")
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def open_content(self, owner: str, file_id: str) -> BinaryIO:
        """The content of a file of ``owner``.

        Raises:
            Refused: 404, the client has no file of this id; 500, its content is damaged.
        """
        file = self.get(owner, file_id)
        damage = self.damage(file.id)
        if damage is not None:
            raise Refused(500, damage, "id", kind="server_error", code="file_damaged")
        return self.path(file.id).open("rb")

    def damage(self, file_id: str) -> str | None:
        """One sentence on the content of a file that has not its size; None for a sound one."""
        row = self._database.connection.execute("SELECT bytes FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is None:
            return f"there is no file {file_id} any more"
        size = row["bytes"]
        try:
            found = self.path(file_id).stat().st_size
        except FileNotFoundError:
            return f"the content of {file_id} is missing on the server's disk"
        return None if found == size else f"the content of {file_id} has {found} bytes on the server's disk, not {size}"

    def path(self, file_id: str) -> Path:
        """Place of a file's content, by an id that was made here."""
        return self._directory / file_id

    def num_bytes(self) -> int:
        """Bytes of all files together, each of at least `SMALLEST`."""
        (total,) = self._database.connection.execute("SELECT sum(max(bytes, ?)) FROM files", (SMALLEST,)).fetchone()
        return total or 0

    def delete_expired(self) -> None:
        """Delete the files whose time is over, but those that an unfinished batch reads. Contents
        go first: nobody finds them any more, and on a full disk the rows need their room.
        """
        now = int(self._now())
        are_over = (
            f"expires_at <= ? AND id NOT IN (SELECT input_file_id FROM batches WHERE status IN {sql_list(UNFINISHED)})"
        )
        for row in self._database.connection.execute(f"SELECT id FROM files WHERE {are_over}", (now,)).fetchall():
            self.path(row["id"]).unlink(missing_ok=True)
        with self._database.transaction() as connection:
            connection.execute(f"DELETE FROM files WHERE {are_over}", (now,))

    def sweep(self) -> None:
        """Delete contents without a row: what a crash has left. Before anything else is done.

        Files with other names than those that are made here are someone's, and stay.
        """
        known = {row["id"] for row in self._database.connection.execute("SELECT id FROM files")}
        for path in (*self._directory.iterdir(), *self.incoming.iterdir()):
            if path.name not in known and _OWN.fullmatch(path.name) and path.is_file():
                path.unlink()


def _sync(path: Path) -> None:
    """Have a file's content, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
