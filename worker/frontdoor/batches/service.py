"""Files and batches as the front door's handlers use them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from worker.frontdoor.batches.multipart import boundary_of, read_form
from worker.frontdoor.batches.objects import INPUT, Page, StoredBatch, StoredFile
from worker.frontdoor.batches.requests import UPLOAD_FILES, UPLOAD_TEXTS, Listing, NewBatch, upload_lifetime_s
from worker.frontdoor.batches.runner import Models, Runner
from worker.frontdoor.batches.running_batch import Ask
from worker.frontdoor.batches.store import Store
from worker.frontdoor.batches.store_thread import StoreThread
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.uploads import Upload, Uploads, errors_of_the_disk
from worker.lifecycle.whole import WholeChanges

logger = logging.getLogger(__name__)

DELETED_EVERY_S = 600.0
"""Seconds between two looks for what has expired."""

MakeUploads = Callable[[Path], Uploads]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of files and batches.

    Attributes:
        file: Bytes of the largest file.
        storage: Bytes of all files together, beyond which uploads are refused.
        concurrency: Requests of all batches that are under way at a time.
        body: Bytes of the largest body of a request.
    """

    file: int
    storage: int
    concurrency: int
    body: int


class BatchService:
    """The files and batches of all clients.

    Args:
        directory: Place of the store.
        limits: Limits of files and batches.
        make_uploads: Makes the room for uploads in a directory.
        ask: Answers the request of a line.
        models: Names of the models that are served.

    Attributes:
        uploads: Room for the bodies of uploads.

    Raises:
        StartupError: the directory cannot be used, or another process uses it.
    """

    def __init__(self, directory: Path, limits: Limits, make_uploads: MakeUploads, ask: Ask, models: Models) -> None:
        self._limits = limits
        self._store = StoreThread(Store(directory, limits.storage))
        self.uploads = make_uploads(self._store.files.incoming)
        self._runner = Runner(self._store, ask, models, limits.concurrency, limits.body)
        self._deleting: asyncio.Task[None] | None = None
        self._changes = WholeChanges()  # what the store has, the runner has to know

    async def start(self) -> None:
        """Go on with the batches that have not ended."""
        for batch in await self._store.do(self._store.batches.unfinished):
            self._runner.begin(batch)
        self._deleting = asyncio.create_task(_delete_old(self._store))

    async def stop(self) -> None:
        """Ask for no more answers: those under way are given up."""
        await self._runner.close()

    async def close(self) -> None:
        """End; the batches that have not ended go on when the directory is used again."""
        if self._deleting is not None:
            self._deleting.cancel()
        await self._changes.ended()
        await self.stop()
        await self._store.close()

    async def add_file(self, owner: str, content_type: bytes, upload: Upload) -> StoredFile:
        """Keep the file of an upload.

        Args:
            owner: Label of the client.
            content_type: Value of that header.
            upload: Body of the request.

        Raises:
            Refused: 400, 413 or 415, the upload is malformed or too large; 507, the disk is full.
        """
        with errors_of_the_disk():
            copying = asyncio.create_task(asyncio.to_thread(_content, upload.path, content_type))
            try:
                content, filename, lifetime_s = await asyncio.shield(copying)
            except asyncio.CancelledError:  # the client has gone; the thread goes on
                copying.add_done_callback(_discard)
                raise
            try:
                if content.stat().st_size > self._limits.file:
                    raise Refused(413, f"file: has more than {self._limits.file} bytes", "file")
                add = self._store.files.add
                return await self._store.do(add, owner, filename, INPUT, content, lifetime_s)
            finally:
                content.unlink(missing_ok=True)

    async def files(self, owner: str, listing: Listing) -> Page[StoredFile]:
        """A part of the files of a client. Raises `Refused` (400)."""
        with errors_of_the_disk(unreadable):
            return await self._store.do(self._store.files.page, owner, listing)

    async def file(self, owner: str, file_id: str) -> StoredFile:
        """A file of a client. Raises `Refused` (404)."""
        with errors_of_the_disk(unreadable):
            return await self._store.do(self._store.files.get, owner, file_id)

    async def open_content(self, owner: str, file_id: str) -> BinaryIO:
        """The content of a file of a client, which may be deleted while it is read.

        Raises:
            Refused: 404, there is none; 500, it is damaged.
        """
        with errors_of_the_disk(unreadable):
            return await self._store.do(self._store.files.open_content, owner, file_id)

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file of a client. Raises `Refused` (404, or 400 while a batch reads it)."""
        with errors_of_the_disk():
            await self._store.do(self._store.files.delete, owner, file_id)

    async def add_batch(self, owner: str, new: NewBatch) -> StoredBatch:
        """Begin a batch.

        Raises:
            Refused: 404, there is no such file; 429, the client has too many; 507, the disk is
                full.
        """

        async def begun() -> StoredBatch:
            batch = await self._store.do(self._store.store.add_batch, owner, new)
            self._runner.begin(batch)
            return batch

        with errors_of_the_disk():
            return await self._changes.made(begun())

    async def batches(self, owner: str, listing: Listing) -> Page[StoredBatch]:
        """A part of the batches of a client. Raises `Refused` (400)."""
        with errors_of_the_disk(unreadable):
            return await self._store.do(self._store.batches.page, owner, listing)

    async def batch(self, owner: str, batch_id: str) -> StoredBatch:
        """A batch of a client. Raises `Refused` (404)."""
        with errors_of_the_disk(unreadable):
            return await self._store.do(self._store.batches.get, owner, batch_id)

    async def cancel_batch(self, owner: str, batch_id: str) -> StoredBatch:
        """End a batch of a client early. Raises `Refused` (404, or 400 if it has ended)."""

        async def stopped() -> StoredBatch:
            batch = await self._store.do(self._store.batches.cancel, owner, batch_id)
            self._runner.stop(batch_id)
            return batch

        with errors_of_the_disk():
            return await self._changes.made(stopped())


async def _delete_old(store: StoreThread) -> None:
    while True:
        await asyncio.sleep(DELETED_EVERY_S)
        try:
            await store.do(store.store.delete_old)
        except (OSError, sqlite3.Error) as error:
            logger.warning("expired files stay for now: %s", error)


def _content(body: Path, content_type: bytes) -> tuple[Path, str, int]:
    """The file of an upload, beside its body; its name, and the seconds for which it is kept."""
    form = read_form(body, boundary_of(content_type), UPLOAD_TEXTS, UPLOAD_FILES)
    lifetime_s = upload_lifetime_s(form.texts)
    if "file" not in form.files:
        raise FieldRefused("file", "is missing")
    file = form.files["file"]
    content = body.with_name(secrets.token_hex(16))
    try:
        with body.open("rb") as source, content.open("xb", 0) as target:
            offset = file.begin
            while offset < file.end:
                offset += os.sendfile(target.fileno(), source.fileno(), offset, file.end - offset)
    except BaseException:
        content.unlink(missing_ok=True)
        raise
    return content, file.filename, lifetime_s


def _discard(copying: asyncio.Task[tuple[Path, str, int]]) -> None:
    """Delete the copy that nobody waits for any more."""
    if not copying.cancelled() and copying.exception() is None:
        with contextlib.suppress(OSError):
            copying.result()[0].unlink(missing_ok=True)


def unreadable(error: Exception) -> Refused:
    """The refusal of a request for what the disk, or the database, does not give back."""
    logger.error("files and batches cannot be read: %s", error)
    problem = "the server's disk does not give back its files and batches; its log says why"
    return Refused(500, problem, kind="server_error", code="storage_failed")
