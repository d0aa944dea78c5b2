"""The store of files and batches: what it says is done stays done, whatever dies."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from worker.frontdoor.batches.database import Database, unusable
from worker.frontdoor.batches.lines import Problem
from worker.frontdoor.batches.objects import INPUT, OUTPUT, UNFINISHED, Status, StoredBatch
from worker.frontdoor.batches.requests import NewBatch
from worker.frontdoor.batches.stored_batches import StoredBatches
from worker.frontdoor.batches.stored_files import StoredFiles
from worker.frontdoor.errors import FieldRefused


class Store:
    """Files and batches in one directory, for one thread at a time.

    Args:
        directory: Place of both; made if it is missing.
        capacity: Bytes of all files together, beyond which uploads are refused.
        now: The clock, in seconds since the epoch.

    Attributes:
        files: The files.
        batches: The batches.

    Raises:
        StartupError: the directory cannot be used, is damaged, or another process uses it.
    """

    def __init__(self, directory: Path, capacity: int, now: Callable[[], float] = time.time) -> None:
        self._database = Database(directory)
        self.batches = StoredBatches(self._database, now)
        try:
            self.files = StoredFiles(self._database, directory / "files", capacity, now)
            self.files.sweep()
            self.delete_old()
        except (OSError, sqlite3.Error) as error:
            self._database.close()
            raise unusable(directory, error) from None

    def add_batch(self, owner: str, new: NewBatch) -> StoredBatch:
        """Begin a batch.

        Raises:
            Refused: 404, the client has no such file; 429, it has too many batches; 413, all files
                have used up the capacity.
        """
        file = self.files.get(owner, new.input_file_id, field="input_file_id")
        if file.purpose != INPUT:
            raise FieldRefused("input_file_id", f"{file.id} has the purpose {file.purpose}, not {INPUT}")
        self.files.check_room(0, "input_file_id")  # its results are written at any rate
        return self.batches.add(owner, new)

    def begin(self, batch_id: str, total: int, model: str | None, *, errors: str | None = None) -> StoredBatch | None:
        """Set a validated batch going, or let it fail.

        Args:
            batch_id: Id of the batch.
            total: Number of its lines.
            model: The model of all its lines, if it is one.
            errors: JSON of the problems of its input.

        Returns:
            The changed batch, None if it has been cancelled meanwhile.
        """
        if errors is not None:
            return self.batches.move(batch_id, ("validating",), "failed", total=total, errors=errors)
        return self.batches.move(batch_id, ("validating",), "in_progress", total=total, model=model)

    def fail_if_damaged(self, batch: StoredBatch) -> bool:
        """Let a batch fail whose input file is not as it was uploaded; whether it is so.

        Results so far are lost: they can be assigned to no request any more.
        """
        damage = self.files.damage(batch.input_file_id)
        if damage is None:
            return False
        problem = Problem("input_file_damaged", damage).as_json()
        with self._database.transaction():
            self.batches.move(batch.id, UNFINISHED, "failed", errors=json.dumps([problem]))
            self.batches.delete_results(batch.id)
        return True

    def finish(
        self, batch: StoredBatch, status: Status, *, answers: Path | None, errors: Path | None, num_unanswered: int
    ) -> StoredBatch | None:
        """End a batch, with its results as files.

        Args:
            batch: The batch.
            status: The status that it ends with.
            answers: File of the answers in `StoredFiles.incoming`; None without any.
            errors: File of the errors; None without any.
            num_unanswered: Lines that have an error since they were not run.

        Returns:
            The ended batch, None if it had ended before.
        """
        added: dict[str, str] = {}
        try:
            with self._database.transaction():
                for column, name, content in (
                    ("output_file_id", "output", answers),
                    ("error_file_id", "error", errors),
                ):
                    if content is not None:
                        filename = f"{batch.id}_{name}.jsonl"
                        file = self.files.add(batch.owner, filename, OUTPUT, content, batch.output_lifetime_s)
                        added[column] = file.id
                failed = self.batches.get(None, batch.id).failed + num_unanswered
                finished = self.batches.move(batch.id, ("finalizing", "cancelling"), status, failed=failed, **added)
                self.batches.delete_results(batch.id)
        except BaseException:
            for file_id in added.values():  # it will be tried again, with other ids
                self.files.path(file_id).unlink(missing_ok=True)
            raise
        return finished

    def delete_old(self) -> None:
        """Delete what has expired."""
        self.files.delete_expired()
        self.batches.delete_old()

    def close(self) -> None:
        """Give the directory back."""
        self._database.close()
