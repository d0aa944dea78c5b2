"""One batch whose lines are run."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from worker.engines.weights import ABORTED
from worker.frontdoor.batches.lines import BadLine, lines_of, request_of
from worker.frontdoor.batches.objects import Result, StoredBatch, TokenCounts
from worker.frontdoor.batches.store_thread import StoreThread
from worker.frontdoor.encoding import encoded
from worker.frontdoor.error_forms import error_body
from worker.frontdoor.errors import Refused
from worker.requests.client_turns import ClientTurns
from worker.requests.continuation import CANNOT_GO_ON

Ask = Callable[[str, str, bytes, str], Awaitable[tuple[int, bytes]]]
"""Answers a request: the label of the client, the path, the body and the request id make the status
and the JSON of the answer.
"""

BUSY = frozenset((429, 503, 529))
"""Statuses of requests that were not run: they are sent again for as long as the batch has."""

BROKEN = frozenset((500, 502, 504))
"""Statuses of requests in whose middle something died: they are sent again a few times, since the
request itself may be what kills it. So are those whose worker died or left, where the others refuse
to go on with its answer.
"""

MOST_BROKEN = 4
"""Times that a request is sent in whose middle something dies."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
"""Seconds before a request is sent again; each time doubles them."""


class _Place(NamedTuple):
    """Place of a line in its file."""

    number: int
    offset: int
    end: int


class RunningBatch:
    """The lines of a batch on their way to their results.

    Args:
        batch: The batch.
        store: Store for its results.
        ask: Answers the request of a line.
        models: Names of the models that are served.
        turns: Requests of all batches that may be under way, of each client in turn.
        longest: Most bytes of a line.
    """

    def __init__(
        self,
        batch: StoredBatch,
        store: StoreThread,
        ask: Ask,
        models: Callable[[], Awaitable[Collection[str]]],
        turns: ClientTurns,
        longest: int,
    ) -> None:
        self._batch = batch
        self._store = store
        self._ask = ask
        self._models = models
        self._turns = turns
        self._longest = longest
        self._away: dict[str, float] = {}  # models that are not served, and the time at which each is asked again
        self._left: list[tuple[str, _Place]] = []  # lines that wait for them

    async def run(self, concurrency: int) -> None:
        """Run the lines that have no result; so many at a time wait for a turn, or have one.

        Lines of models that are not served wait until all others have been run.

        Raises:
            Exception: a result cannot be kept; the other lines under way are given up.
        """
        answered = await self._store.do(self._store.batches.answered, self._batch.id)
        await self._run_each(self._places(answered), concurrency)
        wait_s = FIRST_WAIT_S
        while self._left:
            await asyncio.sleep(wait_s)
            left, self._left, self._away = self._left, [], {}
            await self._run_each(self._returned(left), concurrency)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S) if len(self._left) == len(left) else FIRST_WAIT_S

    async def _run_each(self, places: AsyncIterator[_Place], concurrency: int) -> None:
        free = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                await free.acquire()
                async for place in places:
                    group.create_task(self._run_line(place)).add_done_callback(lambda _: free.release())
                    await free.acquire()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _places(self, answered: Collection[int]) -> AsyncIterator[_Place]:
        """The lines without a result."""
        offset, number = 0, 1
        while (place := await asyncio.to_thread(self._next, offset, number, answered)) is not None:
            yield place
            offset, number = place.end, place.number + 1

    async def _returned(self, left: Iterable[tuple[str, _Place]]) -> AsyncIterator[_Place]:
        """The lines whose model may be back; the others are left again, without a turn."""
        for model, place in left:
            if self._is_away(model):
                self._left.append((model, place))
            else:
                yield place

    def _is_away(self, model: str) -> bool:
        return time.monotonic() < self._away.get(model, 0.0)

    def _next(self, offset: int, number: int, answered: Collection[int]) -> _Place | None:
        """The first line from ``offset`` on that has no result."""
        for line in lines_of(self._path, self._longest, offset, number):
            if not line.is_blank and line.number not in answered:
                return _Place(line.number, offset, line.end)
            offset = line.end
        return None

    async def _run_line(self, place: _Place) -> None:
        wait_s, num_broken = FIRST_WAIT_S, 0
        while True:
            request_id = secrets.token_hex(16)
            # until the result is kept: a crash repeats no more than have a turn
            async with self._turns.turn(self._batch.owner):
                found = await self._ask_once(place, request_id)
                if found is None:
                    return
                status, body = found
                is_broken = status in BROKEN or _says(CANNOT_GO_ON, status, body)
                num_broken += is_broken
                is_to_repeat = status in BUSY or (is_broken and num_broken < MOST_BROKEN)
                if not (is_to_repeat or _says(ABORTED, status, body)):
                    written, counts = await asyncio.to_thread(_kept, body)
                    result = Result(place.number, status, request_id, written)
                    await self._store.do(self._store.batches.add_result, self._batch.id, result, counts)
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _ask_once(self, place: _Place, request_id: str) -> tuple[int, bytes] | None:
        """Status and body of the answer; None if the line is left, as its model is away. That was
        served when the batch was validated: its worker is about to come back. The line is in memory
        for no longer.
        """
        try:
            model, body = await asyncio.to_thread(self._read, place)
        except BadLine as error:  # a later version takes fewer lines than the one that validated them
            refused = Refused(400, error.message, error.param, code=error.code)
            return refused.status, error_body(refused, "openai", "")
        if self._is_away(model):
            self._left.append((model, place))
            return None
        answer = await self._ask(self._batch.owner, self._batch.endpoint, body, request_id)
        if answer[0] == 404 and model not in await self._models():
            self._away[model] = time.monotonic() + LONGEST_WAIT_S
            self._left.append((model, place))
            return None
        return answer

    def _read(self, place: _Place) -> tuple[str, bytes]:
        """Model and body of the request in a line. Raises `BadLine`."""
        line = next(lines_of(self._path, self._longest, place.offset, place.number))
        request = request_of(line, self._batch.endpoint)
        return request.body["model"], encoded(request.body)

    @property
    def _path(self) -> Path:
        return self._store.files.path(self._batch.input_file_id)


def _says(reason: str, status: int, body: bytes) -> bool:
    """Whether an answer is an error with this reason."""
    return status >= 400 and reason.encode() in body


def _kept(body: bytes) -> tuple[bytes, TokenCounts]:
    """JSON in ASCII without line ends, of a text that is no JSON, or nested too deep to be read,
    OpenAI's error; and the tokens it names.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        message = body.decode(errors="replace")[:1000]
        found = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return json.dumps(found, separators=(",", ":")).encode(), token_counts(found)


def token_counts(answer: Any) -> TokenCounts:
    """The tokens that ``usage`` of an answer names, that of a chat, a completion or a response."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return TokenCounts()
    prompt, completion = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    return TokenCounts(
        input_tokens=usage.get(f"{prompt}_tokens") or 0,
        cached_tokens=(usage.get(f"{prompt}_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get(f"{completion}_tokens") or 0,
        reasoning_tokens=(usage.get(f"{completion}_tokens_details") or {}).get("reasoning_tokens") or 0,
    )
