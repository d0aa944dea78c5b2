"""The requests of batches, answered as those of clients are, without a connection between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker.frontdoor.answering import Answer
from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.choices import MAX_ANSWER, Choices
from worker.frontdoor.error_forms import error_body
from worker.frontdoor.errors import Refused, internal_error, no_answer, unreachable
from worker.frontdoor.exchange import Exchange, Handler
from worker.frontdoor.forwarding import ForwardedRequest
from worker.frontdoor.http import Document, answer
from worker.frontdoor.refusal_reading import explaining
from worker.frontdoor.request_intake import AdmittedRequest
from worker.frontdoor.request_reader import Head
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.summaries import served_models

logger = logging.getLogger(__name__)

_HOST, _JSON = (b"host", b"batch"), (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class LineAnswers:
    """Answers requests as the front door answers those of its clients.

    Args:
        door: State that all connections share.
        handlers: Handlers of paths that the front door answers by itself.
        translators: Handlers of chats and completions that are not sent on as they are.
    """

    door: FrontDoor
    handlers: Mapping[tuple[str, str], Handler]
    translators: Mapping[str, Handler]

    async def ask(self, owner: str, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """The status and the body of the answer to a POST; see `Ask`."""
        if len(body) > self.door.max_body:
            refused = Refused(413, f"the body has more than {self.door.max_body} bytes")
            return refused.status, error_body(refused, "openai", "")
        route = self.door.routes.check(self.door.routes.at(path), "POST", path)
        lines = [_HOST, _JSON]
        head = Head(b"POST", path.encode(), b"1.1", lines, dict(lines))
        request = AdmittedRequest(head, path, route, owner.encode(), request_id.encode())
        waiting = _WaitingClient(request)
        try:
            if route.by == "handler":
                waiting.answer = exchange = Exchange(waiting, self.door, request, body)
                exchange.run(self.handlers["POST", route.path])
            else:
                await self._forward(waiting, request, body)
            return await waiting.found
        except Refused as refused:
            return refused.status, error_body(refused, "openai", "")
        except Exception:  # the request's boundary: the other lines of its batch go on
            logger.exception("request %s of a batch failed", request_id)
            internal = internal_error()
            return internal.status, error_body(internal, "openai", "")
        finally:
            waiting.abort()

    async def models(self) -> frozenset[str]:
        """Names of the models that are served, empty if no frontend says so."""
        try:
            return frozenset(await served_models(self.door.upstreams))
        except Refused:
            return frozenset()

    async def _forward(self, waiting: _WaitingClient, request: AdmittedRequest, body: bytes) -> None:
        """Send a request on, after all checks. Raises `Refused`."""
        bodies: tuple[bytes, ...] | dict[str, Any] = (body,)
        is_checked = request.route.by == "checked"

        def explain(refused: Refused) -> None:
            waiting.answer = exchange = Exchange(waiting, self.door, request, body)
            exchange.run(explaining(refused))

        if is_checked:
            rewrite = partial(self.door.rewrite, request.path, body, request.head)
            bodies = await self.door.rewriting.by_size(request.label, len(body), rewrite)
        upstreams = self.door.upstreams
        if isinstance(bodies, dict):
            waiting.answer = exchange = Exchange(waiting, self.door, request, body, bodies)
            exchange.run(self.translators[request.path])
        elif len(bodies) == 1:
            waiting.answer = forwarded = ForwardedRequest(
                waiting, upstreams, head_only=False, free=_nothing, refused=explain if is_checked else None
            )
            forwarded.ask(request.forwarded(bodies[0], is_last=False))
        else:
            waiting.answer = choices = Choices(waiting, request.choices(bodies), chunked=True, refused=explain)
            choices.ask(upstreams)


class _WaitingClient:
    """A client that waits for the whole of one answer; the `Client` of an `Exchange`, too.

    Args:
        request: The request.

    Attributes:
        answer: Answer under way.
        found: The status and the body of its answer.
    """

    def __init__(self, request: AdmittedRequest) -> None:
        self._request = request
        self._parsed = ParsedAnswer(self, 0)
        self.answer: Answer | None = None
        self.found: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """End the request, unless it has been answered."""
        if self.answer is not None and not self.found.done():
            self.answer.abort()

    # An `Asker`, and the `Client` of an `Exchange`.

    def received(self, data: bytes) -> None:
        """Bytes of the answer."""
        self._parsed.received(data)

    def answered(self, closes: bool) -> None:
        """The answer is complete."""
        self._parsed.answered(closes)

    def unreachable(self) -> None:
        """No frontend can be reached."""
        self.refused(unreachable())

    def own_headers(self) -> bytes:
        """Header lines that every answer has, each with its CRLF."""
        return b"x-request-id: %b\r\n" % self._request.request_id

    def written(self, status: int, document: Document) -> bytes:
        """Bytes of a whole answer."""
        headers = document.headers + self.own_headers()
        return answer(status, document.body, keep_alive=True, content_type=document.content_type, headers=headers)

    def refused(self, refused: Refused) -> None:
        """The answer is an error."""
        self._set(refused.status, error_body(refused, "openai", ""))

    # A `Whole` of the bytes of the answer; `failed` is that of the `Asker`, too.

    def headed(self, answer: ParsedAnswer) -> None:
        """The head of the answer has come."""

    def data(self, answer: ParsedAnswer, data: bytes) -> None:
        """Bytes of the answer's body."""
        answer.take(data)
        if answer.num_bytes > MAX_ANSWER and self.answer is not None:
            self.answer.abort()
            self.failed(True, f"an answer beyond {MAX_ANSWER} bytes")

    def ended(self, answer: ParsedAnswer) -> None:
        """The answer is complete."""
        self._set(answer.status, answer.body)

    def failed(self, begun: object, reason: str) -> None:
        """The frontend has gone before the end of the answer."""
        self.refused(no_answer(reason))

    def _set(self, status: int, body: bytes) -> None:
        if not self.found.done():
            self.found.set_result((status, body))


def _nothing() -> None:
    """Free no body: it is the batch's."""
