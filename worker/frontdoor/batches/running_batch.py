"""One batch whose lines are run."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from worker.frontdoor.batches.lines import BadLine, Line, LineRequest, lines_of, request_of
from worker.frontdoor.batches.objects import Result, StoredBatch
from worker.frontdoor.batches.store_thread import StoreThread
from worker.frontdoor.error_forms import error_body
from worker.frontdoor.errors import Refused

Ask = Callable[[str, str, dict[str, Any], str], Awaitable[tuple[int, bytes]]]
"""Answers a request: the label of the client, the path, the body and the request id make the status
and the JSON of the answer.
"""

BUSY = frozenset((429, 503))
"""Statuses of requests that were not run: they are sent again for as long as the batch has."""

BROKEN = frozenset((500, 502, 504))
"""Statuses of requests in whose middle something died: they are sent again a few times, since the
request itself may be what kills it.
"""

MOST_BROKEN = 4
"""Times that a request is sent that ends with one of `BROKEN`."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
"""Seconds before a request is sent again; each time doubles them."""


class RunningBatch:
    """The lines of a batch on their way to their results.

    Args:
        batch: The batch.
        store: Where its results go.
        ask: Answers the request of a line.
        models: Names of the models that are served.
        turns: Requests of all batches that may be under way.
        longest: Most bytes of a line.
    """

    def __init__(
        self,
        batch: StoredBatch,
        store: StoreThread,
        ask: Ask,
        models: Callable[[], Awaitable[Collection[str]]],
        turns: asyncio.Semaphore,
        longest: int,
    ) -> None:
        self._batch = batch
        self._store = store
        self._ask = ask
        self._models = models
        self._turns = turns
        self._longest = longest

    async def run(self, concurrency: int) -> None:
        """Run the lines that have no result; so many at a time are read.

        Raises:
            Exception: a result cannot be kept; the other lines under way are given up.
        """
        answered = await self._store.do(self._store.batches.answered, self._batch.id)
        places = asyncio.Semaphore(concurrency)
        offset, number = 0, 1
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await places.acquire()
                    line = await asyncio.to_thread(self._next_line, offset, number, answered)
                    if line is None:
                        break
                    offset, number = line.end, line.number + 1
                    group.create_task(self._run_line(line)).add_done_callback(lambda _: places.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _next_line(self, offset: int, number: int, answered: Collection[int]) -> Line | None:
        path = self._store.files.path(self._batch.input_file_id)
        for line in lines_of(path, self._longest, offset, number):
            if not line.is_blank and line.number not in answered:
                return line
        return None

    async def _run_line(self, line: Line) -> None:
        try:
            request = request_of(line, self._batch.endpoint)
        except BadLine as error:  # a later version takes fewer lines than the one that validated them
            refused = Refused(400, error.message, error.param, code=error.code)
            await self._keep(Result(line.number, 400, secrets.token_hex(16), error_body(refused, "openai", "")))
            return
        wait_s, num_broken = FIRST_WAIT_S, 0
        while True:
            request_id = secrets.token_hex(16)
            async with self._turns:
                status, body = await self._ask(self._batch.owner, request.url, request.body, request_id)
            num_broken += status in BROKEN
            if not await self._is_to_repeat(request, status, num_broken):
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        await self._keep(Result(line.number, status, request_id, _one_line(body)))

    async def _keep(self, result: Result) -> None:
        await self._store.do(self._store.batches.add_result, self._batch.id, result)

    async def _is_to_repeat(self, request: LineRequest, status: int, num_broken: int) -> bool:
        """Whether an answer is none for good: the frontend or the worker is not there right now."""
        if status in BUSY or (status in BROKEN and num_broken < MOST_BROKEN):
            return True
        # the model was served when the batch was validated: its worker is about to come back
        return status == 404 and request.body["model"] not in await self._models()


def _one_line(body: bytes) -> bytes:
    """JSON without line ends; a text that is no JSON as OpenAI's error."""
    try:
        found = json.loads(body)
    except ValueError:
        message = body.decode(errors="replace")[:1000]
        found = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return json.dumps(found, separators=(",", ":")).encode()
