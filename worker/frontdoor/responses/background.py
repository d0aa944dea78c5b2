"""Background responses: they are generated whether or not their client stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing

from worker.frontdoor.errors import Refused, internal_error
from worker.frontdoor.responses.generation import Generation, as_sent
from worker.frontdoor.responses.outputs import Event
from worker.frontdoor.responses.response import Response
from worker.frontdoor.responses.store import StoredItem

logger = logging.getLogger(__name__)


class BackgroundRun:
    """One background response while it is generated.

    Args:
        generation: The response.
        keeps_events: Whether it can be streamed again later.
        ended: Called at its end.

    Attributes:
        events: Events so far, as they are sent, in order of their sequence numbers; none unless it
            can be streamed again.
    """

    def __init__(self, generation: Generation, *, keeps_events: bool, ended: Callable[[], object]) -> None:
        self._generation = generation
        self._ended = ended
        self._news = asyncio.Event()
        self._is_over = False
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        self._take(generation.answer.created())
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self._end())

    @property
    def response(self) -> Response:
        """The response as far as it has been generated."""
        return self._generation.answer.response

    @property
    def context(self) -> Sequence[StoredItem]:
        """The items before its output."""
        return self._generation.context

    async def cancel(self) -> None:
        """End it, and wait until it has ended. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Events so far, and then those to come.

        Args:
            after: Sequence number of the last event that is left out.
        """
        place = after + 1
        while True:
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self._is_over:
                return
            self._news.clear()  # every follower looks again before it waits again
            await self._news.wait()

    async def _run(self) -> None:
        answer = self._generation.answer
        try:
            async with aclosing(self._generation.events()) as batches:
                async for events in batches:
                    self._take(events)
        except Refused as refused:
            self._take(answer.failed(refused))
        except Exception:  # the request's boundary
            logger.exception("the background response %s failed", self.response["id"])
            self._take(answer.failed(internal_error()))

    def _end(self) -> None:
        if not self._generation.answer.is_over:  # it was cancelled: by a client, or at the end of the front door
            self._take(self._generation.answer.cancelled())
        self._is_over = True
        self._news.set()
        self._ended()

    def _take(self, events: Iterable[Event]) -> None:
        """Take events, and store the response with the last ones."""
        taken = list(events)
        sent = self._as_sent(taken)
        if self._generation.answer.is_over and not self._generation.keep(taken, [*self.events, *sent]):
            sent = self._as_sent(taken)  # which now say so
        self.events += sent
        self._news.set()

    def _as_sent(self, events: Iterable[Event]) -> list[bytes]:
        """Events as they are sent, if anybody can ask for them: each is many times its text."""
        return [*map(as_sent, events)] if self.keeps_events else []
