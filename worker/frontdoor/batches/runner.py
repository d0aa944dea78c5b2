"""Runs batches: validates them, asks for the answer of each line, and writes the results.

What is done is in the store before anything builds on it, so that a process that dies at any point
goes on there when it starts again: lines with a result are not run again, and the others are.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from worker.frontdoor.batches.lines import ROOM_BESIDE_BODY, Checked, checked
from worker.frontdoor.batches.objects import Status, StoredBatch
from worker.frontdoor.batches.output import write_output
from worker.frontdoor.batches.running_batch import Ask, RunningBatch
from worker.frontdoor.batches.store_thread import StoreThread
from worker.frontdoor.errors import Refused
from worker.requests.client_turns import ClientTurns

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds after which a batch goes on that the disk, or an error of our own, has held up."""

POLL_S = 0.5
"""Seconds between two questions whether a model is served, before a batch is validated."""

AWAY_S = 60.0
"""Seconds for which a model may be away before a batch that names it fails: its only worker may be
about to come back, while others serve other models.
"""

Models = Callable[[], Awaitable[Collection[str]]]


class Runner:
    """All batches that have not ended.

    Args:
        store: The store.
        ask: Answers the request of a line.
        models: Names of the models that are served, empty while none is known.
        concurrency: Requests of all batches that are under way at a time.
        max_body: Bytes of the largest body of a request.
    """

    def __init__(self, store: StoreThread, ask: Ask, models: Models, concurrency: int, max_body: int) -> None:
        self._store = store
        self._ask = ask
        self._models = models
        self._concurrency = concurrency
        self._turns = ClientTurns(concurrency)
        self._validating = asyncio.Semaphore(1)
        self._longest = max_body + ROOM_BESIDE_BODY
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopped: dict[str, asyncio.Event] = {}

    def begin(self, batch: StoredBatch) -> None:
        """Run a batch, from where it is."""
        self._stopped[batch.id] = asyncio.Event()
        task = self._running[batch.id] = asyncio.create_task(self._run(batch.id))
        task.add_done_callback(lambda _: (self._running.pop(batch.id), self._stopped.pop(batch.id)))

    def stop(self, batch_id: str) -> None:
        """End the work on a batch that has been cancelled in the store."""
        if batch_id in self._stopped:
            self._stopped[batch_id].set()

    async def close(self) -> None:
        """End all work; the store has what is done."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, batch_id: str) -> None:
        while True:
            try:
                await self._advance(batch_id)
                return
            except Refused:  # it is not in the store any more
                return
            except (OSError, sqlite3.Error) as error:  # a full disk, until it has room again
                logger.warning("batch %s waits: %s", batch_id, error)
            except Exception:  # the batch's boundary
                logger.exception("batch %s failed, and is tried again", batch_id)
            await asyncio.sleep(RETRY_S)

    async def _advance(self, batch_id: str) -> None:
        """Take a batch to its end, from the status that it has in the store."""
        batch = await self._get(batch_id)
        if await self._store.do(self._store.store.fail_if_damaged, batch):
            return
        if batch.status in ("validating", "in_progress"):
            await self._until_stopped(batch, self._work(batch))
            batch = await self._get(batch_id)
        if batch.status in ("validating", "in_progress"):
            await self._store.do(self._store.batches.move, batch_id, ("validating", "in_progress"), "finalizing")
            batch = await self._get(batch_id)  # a cancellation may have come first
        if batch.status in ("finalizing", "cancelling"):
            await self._finish(batch)

    async def _get(self, batch_id: str) -> StoredBatch:
        return await self._store.do(self._store.batches.get, None, batch_id)

    async def _until_stopped(self, batch: StoredBatch, work: Coroutine[Any, Any, None]) -> None:
        """Work on a batch until it is done, cancelled or expired.

        Raises:
            Exception: what the work raises.
        """
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stopped[batch.id].wait())
        try:
            left_s = max(0.0, batch.expires_at - time.time())
            await asyncio.wait((working, stopping), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            ended = working.done()
            working.cancel()
            found = await asyncio.gather(working, return_exceptions=True)
        if ended and isinstance(found[0], Exception):
            raise found[0]

    async def _work(self, batch: StoredBatch) -> None:
        if batch.status == "validating":
            begun = await self._validate(batch)
            if begun is None or begun.status != "in_progress":
                return
            batch = begun
        running = RunningBatch(batch, self._store, self._ask, self._models, self._turns, self._longest)
        await running.run(self._concurrency)

    async def _validate(self, batch: StoredBatch) -> StoredBatch | None:
        """The batch once its lines have been looked at; None if it has been cancelled."""
        found = await self._checked(batch)
        problems = [problem.as_json() for problem in found.problems]
        errors = json.dumps(problems) if problems else None
        return await self._store.do(self._store.store.begin, batch.id, found.total, found.model, errors=errors)

    async def _checked(self, batch: StoredBatch) -> Checked:
        """The lines of a batch, looked at again as other models are served, if that may help."""
        path, end_s = self._store.files.path(batch.input_file_id), time.monotonic() + AWAY_S
        models: Collection[str] = ()
        while True:
            models = await self._other_models(models, end_s)
            async with self._validating:
                found = await asyncio.to_thread(checked, path, batch.endpoint, self._longest, models)
            if not found.lacks_models_alone or time.monotonic() >= end_s:
                return found

    async def _other_models(self, models: Collection[str], end_s: float) -> Collection[str]:
        """The models that are served, once they are others than ``models``, or it is ``end_s``."""
        while True:
            served = await self._models()
            if served and (served != models or time.monotonic() >= end_s):
                return served
            await asyncio.sleep(POLL_S)

    async def _finish(self, batch: StoredBatch) -> None:
        status: Status = "completed"
        if batch.status == "cancelling":
            status = "cancelled"
        elif batch.completed + batch.failed < batch.total or batch.in_progress_at is None:
            status = "expired"
        if batch.in_progress_at is None:  # no line has been looked at
            await self._store.do(self._store.batches.move, batch.id, (batch.status,), status)
            return
        output = await write_output(self._store, batch, status, self._longest)
        try:
            await self._store.do(
                self._store.store.finish,
                batch,
                status,
                answers=output.answers,
                errors=output.errors,
                num_unanswered=output.num_unanswered,
            )
        except (OSError, sqlite3.Error):  # it is tried again, with files of other names
            output.delete()
            raise
