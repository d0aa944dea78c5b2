"""Batches of clients and the results of their lines, in the database."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from worker.frontdoor.batches.database import Database, sql_list
from worker.frontdoor.batches.objects import (
    FINISHED,
    UNFINISHED,
    Page,
    Result,
    Status,
    StoredBatch,
    TokenCounts,
    batch_of,
)
from worker.frontdoor.batches.requests import Listing, NewBatch
from worker.frontdoor.errors import Refused
from worker.frontdoor.values import printable

NO_TOKENS = TokenCounts()
MOST_UNFINISHED = 100
"""Batches of one client that may be unfinished at a time."""

KEPT_S = 30 * 24 * 3600
"""Seconds for which a batch is known after its end."""

MOST_KEPT = 10_000
"""Batches of one client that are known: those that ended first are forgotten for new ones."""


class StoredBatches:
    """The batches of all clients.

    Args:
        database: Database with the rows.
        now: The clock, in seconds since the epoch.
    """

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def add(self, owner: str, new: NewBatch) -> StoredBatch:
        """Begin a batch.

        Raises:
            Refused: 429, the client has `MOST_UNFINISHED`.
        """
        now = int(self._now())
        with self._database.transaction() as connection:
            connection.execute(
                f"DELETE FROM batches WHERE owner = ? AND status IN {sql_list(FINISHED)} AND number <="
                " (SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (owner, owner, MOST_KEPT - 1),
            )
            (unfinished,) = connection.execute(
                f"SELECT count(*) FROM batches WHERE owner = ? AND status IN {sql_list(UNFINISHED)}", (owner,)
            ).fetchone()
            if unfinished >= MOST_UNFINISHED:
                problem = f"{MOST_UNFINISHED} batches have not ended; wait for one, or cancel it"
                raise Refused(429, problem, kind="rate_limit_error", code="too_many_batches")
            row = connection.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, metadata,"
                " output_lifetime_s, status, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
                (
                    f"batch_{secrets.token_hex(12)}",
                    owner,
                    new.endpoint,
                    new.input_file_id,
                    new.completion_window,
                    None if new.metadata is None else json.dumps(new.metadata),
                    new.output_lifetime_s,
                    "validating",
                    now,
                    now + new.window_s,
                ),
            ).fetchone()
        return batch_of(row)

    def get(self, owner: str | None, batch_id: str) -> StoredBatch:
        """A batch of ``owner``, None for any. Raises `Refused` (404) if there is none."""
        row = self._database.connection.execute(
            "SELECT * FROM batches WHERE id = ? AND (? IS NULL OR owner = ?)", (batch_id, owner, owner)
        ).fetchone()
        if row is None:
            raise Refused(404, f"there is no batch {printable(batch_id)}", "id", code="batch_not_found")
        return batch_of(row)

    def page(self, owner: str, listing: Listing) -> Page[StoredBatch]:
        """A part of the batches of ``owner``, the newest first.

        Raises:
            Refused: 400, there is no batch ``after``.
        """
        connection, after, limit, number = self._database.connection, listing.after, listing.limit, None
        if after is not None:
            row = connection.execute("SELECT number FROM batches WHERE id = ? AND owner = ?", (after, owner)).fetchone()
            if row is None:
                raise Refused(400, f"after: there is no batch {printable(after)}", "after")
            number = row["number"]
        rows = connection.execute(
            "SELECT * FROM batches WHERE owner = ? AND (? IS NULL OR number < ?) ORDER BY number DESC LIMIT ?",
            (owner, number, number, limit + 1),
        ).fetchall()
        return Page([batch_of(row) for row in rows[:limit]], len(rows) > limit)

    def unfinished(self) -> list[StoredBatch]:
        """The batches of all clients that have not ended, the oldest first."""
        rows = self._database.connection.execute(
            f"SELECT * FROM batches WHERE status IN {sql_list(UNFINISHED)} ORDER BY number"
        )
        return [batch_of(row) for row in rows]

    def move(self, batch_id: str, origins: Sequence[Status], status: Status, **values: Any) -> StoredBatch | None:
        """Give a batch another status, with the time of it.

        Args:
            batch_id: Id of the batch.
            origins: Statuses that it may have had.
            status: New status of the batch.
            values: Further columns, and their values.

        Returns:
            The changed batch, None if it had another status.
        """
        values = {"status": status, f"{status}_at": int(self._now()), **values}
        with self._database.transaction() as connection:
            row = connection.execute(
                f"UPDATE batches SET {', '.join(f'{name} = ?' for name in values)}"
                f" WHERE id = ? AND status IN {sql_list(origins)} RETURNING *",
                (*values.values(), batch_id),
            ).fetchone()
        return None if row is None else batch_of(row)

    def cancel(self, owner: str, batch_id: str) -> StoredBatch:
        """Have a batch of ``owner`` end; one that is being cancelled stays as it is.

        Raises:
            Refused: 404, there is none of this id; 400, it has ended, or is about to.
        """
        with self._database.transaction():
            batch = self.get(owner, batch_id)
            if batch.status == "cancelling":
                return batch
            moved = self.move(batch_id, ("validating", "in_progress"), "cancelling")
            if moved is None:
                problem = f"a batch with status {batch.status} cannot be cancelled"
                raise Refused(400, problem, "id", code="batch_not_cancellable")
        return moved

    def add_result(self, batch_id: str, result: Result, counts: TokenCounts = NO_TOKENS) -> None:
        """Keep the result of a line that has none yet, and count its tokens."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO results (batch_id, line, succeeded, status_code, request_id, body)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (batch_id, result.line, result.succeeded, result.status_code, result.request_id, result.body),
            )
            column = "completed" if result.succeeded else "failed"
            added = {column: 1, **asdict(counts)}
            connection.execute(
                f"UPDATE batches SET {', '.join(f'{name} = {name} + ?' for name in added)} WHERE id = ?",
                (*added.values(), batch_id),
            )

    def answered(self, batch_id: str) -> set[int]:
        """Numbers of the lines that have a result."""
        rows = self._database.connection.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
        return {row["line"] for row in rows}

    def results(self, batch_id: str, first: int, last: int) -> dict[int, Result]:
        """The results of lines ``first`` to ``last``, by the number of the line."""
        rows = self._database.connection.execute(
            "SELECT line, status_code, request_id, body FROM results WHERE batch_id = ? AND line BETWEEN ? AND ?",
            (batch_id, first, last),
        )
        return {row["line"]: Result(*row) for row in rows}

    def delete_results(self, batch_id: str) -> None:
        """Delete the results of a batch: they are in its files."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM results WHERE batch_id = ?", (batch_id,))

    def delete_old(self) -> None:
        """Delete the batches that ended more than `KEPT_S` ago."""
        with self._database.transaction() as connection:
            connection.execute(
                f"DELETE FROM batches WHERE status IN {sql_list(FINISHED)}"
                " AND coalesce(completed_at, failed_at, expired_at, cancelled_at) <= ?",
                (int(self._now()) - KEPT_S,),
            )
