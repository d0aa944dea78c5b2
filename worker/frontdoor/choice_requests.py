"""The requests for each choice, each on a connection to a frontend of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from worker.frontdoor.answers import ParsedAnswer, Whole
from worker.frontdoor.http import AnswerEnd
from worker.frontdoor.upstreams import NoUpstream, Upstreams


class ChoiceRequests:
    """Sends the requests, and reads their answers.

    Args:
        whole: Is told of the answers.
        requests: A request per choice, head and body.
        unreachable: Called if no frontend can be reached for one that is still wanted.

    Attributes:
        answers: The answers, in the order of the requests.
    """

    def __init__(self, whole: Whole, requests: Sequence[bytes], unreachable: Callable[[], None]) -> None:
        self._requests = list(requests)
        self._unreachable = unreachable
        self._asking: list[asyncio.Task[None]] = []
        self._is_paused = False
        self._is_over = False
        self.answers = [ParsedAnswer(whole, index) for index in range(len(requests))]

    def ask(self, upstreams: Upstreams) -> None:
        """Send the requests."""
        loop = asyncio.get_running_loop()
        self._asking = [loop.create_task(self._ask(upstreams, answer)) for answer in self.answers]

    async def _ask(self, upstreams: Upstreams, answer: ParsedAnswer) -> None:
        try:
            await upstreams.connect(upstreams.in_turn(), answer.connection)
        except NoUpstream:
            if not (self._is_over or answer.ended):
                self._unreachable()
            return
        if self._is_over or answer.ended:  # a cancellation may come too late to be noticed
            answer.connection.abort()
            return
        if self._is_paused:
            answer.connection.pause()
        answer.connection.begin(answer, AnswerEnd(), self._requests[answer.index])
        self._requests[answer.index] = b""  # answers take long, and a request may be large

    def pause(self) -> None:
        """Read no more for now."""
        self._is_paused = True
        for answer in self.answers:
            answer.connection.pause()

    def resume(self) -> None:
        """Read again."""
        self._is_paused = False
        for answer in self.answers:
            answer.connection.resume()

    def abort(self) -> None:
        """End all of them. Idempotent."""
        self._is_over = True
        for task in self._asking:
            task.cancel()
        for answer in self.answers:
            if not answer.ended:
                answer.connection.abort()

    def keep(self, kept: ParsedAnswer) -> None:
        """End all but one."""
        for answer, asking in zip(self.answers, self._asking, strict=True):
            if answer is not kept:
                asking.cancel()  # it may not be connected yet
                answer.ended = True
                answer.connection.abort()
