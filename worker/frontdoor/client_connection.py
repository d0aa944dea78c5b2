"""One client's connection: its requests, one after the other, and their answers.

An answer's bytes go from one socket to the other as they come, unchanged and at once; only its end
is looked for, and an error there. A slow reader holds back the frontend, and a client that leaves
ends its request there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from worker.frontdoor.absence_probe import AbsenceProbe
from worker.frontdoor.answering import Answer
from worker.frontdoor.choices import Choices
from worker.frontdoor.deadline import WaitingProtocol
from worker.frontdoor.error_forms import error_body
from worker.frontdoor.errors import Refused, internal_error, no_answer, unreachable
from worker.frontdoor.exchange import Exchange, Handler
from worker.frontdoor.forwarding import ForwardedRequest
from worker.frontdoor.handlers import HANDLERS, TRANSLATORS
from worker.frontdoor.http import INTERIM, Document, answer
from worker.frontdoor.refusal_reading import ending, explaining
from worker.frontdoor.request_intake import AdmittedRequest, RequestIntake
from worker.frontdoor.rewriting import AT_ONCE
from worker.frontdoor.server import FrontDoor

logger = logging.getLogger(__name__)

MAX_PIPELINED = 64 * 1024
"""Bytes that are read of what a client sends ahead of the answer to its request."""

MOST_KEPT = 64 * 1024
"""Bytes of the largest body that is kept while its answer is streamed, to ask once more why that
failed.
"""

REFUSED_S = 5.0
"""Seconds for which a refused client may go on sending, so that it gets to read why."""


class ClientConnection(WaitingProtocol):
    """One client's connection; the `Asker` of its requests.

    Args:
        door: State that all connections share.
    """

    def __init__(self, door: FrontDoor) -> None:
        super().__init__()
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._intake = RequestIntake(door)
        self._keep_alive = True
        self._answering = False
        self._is_closing = False  # nothing that the client sends is read any more
        self._is_half_closed = False  # the client sends no more
        self._holds_back = False  # it has sent enough ahead
        self._paused = False  # it does not keep up
        self._unsent = 0  # bytes that it had to read when the connection began to wait for it
        self._rewriting: asyncio.Task[None] | None = None
        self._answer: Answer | None = None
        self._probe = AbsenceProbe()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._intake.peer = str((transport.get_extra_info("peername") or ("",))[0]).encode()
        self._door.added(self)
        if self._door.has_room():
            self._expect(self._door.options.header_timeout_s)
        else:
            self._refuse(Refused(503, "too many connections", kind="server_error"))

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if not self._intake.has_begun:
            self._expect(self._door.options.header_timeout_s)
            self._door.waits_no_more(self)
        self._intake.feed(data)
        if self._answering:
            self._hold_back()
        else:
            self._advance()

    def eof_received(self) -> bool:
        """The client sends no more, but may wait for its answer; whether the connection stays."""
        self._is_half_closed = True
        if self._is_closing or not (self._answering or self._intake.has_begun):
            return False
        if self._answering:
            self._probe.start(self._try_client)
        else:
            self._refuse(Refused(400, "the request ends before its end"))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._probe.stop()
        self._intake.free_body()
        if self._rewriting is not None:
            self._rewriting.cancel()
        if self._answer is not None:
            self._answer.abort()
        self._rewriting = self._answer = self._transport = None
        self._door.removed(self)

    def pause_writing(self) -> None:
        self._paused = True
        if self._answer is not None:
            self._answer.pause()
            self._expect_reader(self._door.options.send_timeout_s)

    def resume_writing(self) -> None:
        self._paused = False
        if self._answer is not None:
            self._expect_nothing()
            self._answer.resume()
        else:
            self._advance()

    # The request.

    def _advance(self) -> None:
        if self._answering or self._paused or self._transport is None:
            return
        try:
            found = self._intake.next(self._refuse)
            if found is not None:
                self._expect_nothing()
                self._begin_answer(*found)
                return
            if self._is_half_closed and self._intake.has_begun:
                raise Refused(400, "the request ends before its end")
        except Refused as refused:
            self._refuse(refused)
            return
        except Exception:  # the request's boundary
            self._refuse(self._logged_error())
            return
        left_s = self._intake.left_s()
        if left_s is not None:
            self._expect(left_s)
            if self._intake.takes_continue():
                self._transport.write(INTERIM)

    def _hold_back(self) -> None:
        """Read no more of what is sent ahead than has its place."""
        if self._intake.num_ahead > MAX_PIPELINED and self._transport is not None and not self._holds_back:
            self._holds_back = True
            self._transport.pause_reading()

    # The answer.

    def _begin_answer(self, request: AdmittedRequest, body: bytes) -> None:
        self._answering = True
        self._keep_alive = self._keep_alive and request.head.may_stay_open and not self._door.draining
        self._hold_back()
        if self._is_half_closed:
            self._probe.start(self._try_client)
        by = request.route.by
        if request.is_preflight:
            lines = self._door.cors.preflight_lines(request.head, request.route.methods)
            self.received(self.written(200, Document(b"text/plain", b"", lines)))
            self.answered(closes=False)
        elif by == "document":
            self.received(self.written(200, self._door.documents[request.path]))
            self.answered(closes=False)
        elif by in ("health", "metrics"):
            self._intake.free_body()
            self._answer = summary = self._door.summary(self, request.route.path, self.written)
            summary.ask()
        elif by == "handler":
            self._hand_over(request, body, HANDLERS[request.head.method.decode(), request.route.path])
        elif by == "checked" and len(body) > AT_ONCE:
            self._rewriting = self._loop.create_task(self._rewrite_aside(request, body))
        else:
            rewritten = (body,) if by == "frontend" else self._door.rewrite(request.path, body, request.head)
            self._ask(request, body, rewritten)

    async def _rewrite_aside(self, request: AdmittedRequest, body: bytes) -> None:
        rewrite = partial(self._door.rewrite, request.path, body, request.head)
        rewritten: tuple[bytes, ...] | dict[str, Any] | Refused
        try:
            rewritten = await self._door.rewriting.aside(request.label, rewrite)
        except Refused as refused:
            rewritten = refused
        except Exception:  # the request's boundary
            rewritten = self._logged_error()
        self._rewriting = None
        if isinstance(rewritten, Refused):
            self._refuse(rewritten)
        else:
            self._ask(request, body, rewritten)

    def _ask(self, request: AdmittedRequest, body: bytes, bodies: Sequence[bytes] | dict[str, Any]) -> None:
        """Send the request on; each of several choices is one of its own."""
        if isinstance(bodies, dict):
            self._hand_over(request, body, TRANSLATORS[request.route.path], bodies)
            return
        upstreams, is_checked = self._door.upstreams, request.route.by == "checked"
        late = partial(self._end_with_error, request, body) if is_checked and len(body) <= MOST_KEPT else None
        try:
            if is_checked:
                self._intake.keep_body()
        except Refused as refused:
            self._refuse(refused)
            return
        if len(bodies) == 1:
            is_head = request.head.method == b"HEAD"
            added = self._door.cors.lines(request.head)
            self._answer = forwarded = ForwardedRequest(
                self,
                upstreams,
                head_only=is_head,
                free=self._intake.free_body,
                added=added,
                refused=partial(self._explain, request, body) if is_checked else None,
                late=late if request.has_version_1_1 else None,
            )
            forwarded.ask(request.forwarded(bodies[0], is_last=self._door.draining))
        else:
            self._answer = choices = Choices(
                self,
                request.choices(bodies),
                chunked=request.has_version_1_1,
                refused=partial(self._explain, request, body),
                late=late,
                added=self._door.cors.lines(request.head),
            )
            choices.ask(upstreams)

    def _hand_over(
        self, request: AdmittedRequest, body: bytes, handler: Handler, fields: dict[str, Any] | None = None
    ) -> None:
        """Let a handler answer; ``fields``: the body, if it has been parsed."""
        try:
            held = self._intake.hold_body()
        except Refused as refused:
            self._refuse(refused)
            return
        self._answer = exchange = Exchange(self, self._door, request, body, fields, held)
        exchange.run(handler)

    def _explain(self, request: AdmittedRequest, body: bytes, refused: Refused) -> None:
        """Answer with the error of a frontend, once its reason and the client's field are found."""
        self._hand_over(request, body, explaining(refused))

    def _end_with_error(self, request: AdmittedRequest, body: bytes, refused: Refused) -> None:
        """End a stream with the error that a frontend has ended it with, explained likewise."""
        self._hand_over(request, body, ending(refused))

    def own_headers(self) -> bytes:
        """Header lines that every answer of the front door's own has, each with its CRLF."""
        lines = b"x-request-id: %b\r\n%b" % (self._intake.request_id, self._door.cors.lines(self._intake.head))
        if self._intake.error_form == "anthropic":  # whose clients read it under this name
            lines += b"request-id: %b\r\n" % self._intake.request_id
        return lines

    def written(self, status: int, document: Document, *, keep_alive: bool | None = None) -> bytes:
        """An answer of the front door's own."""
        return answer(
            status,
            document.body,
            keep_alive=self._keep_alive if keep_alive is None else keep_alive,
            head_only=self._intake.head is not None and self._intake.head.method == b"HEAD",
            content_type=document.content_type,
            headers=document.headers + self.own_headers(),
        )

    def received(self, data: bytes) -> None:
        """Write bytes of the answer."""
        if self._transport is not None:
            self._transport.write(data)

    def unreachable(self) -> None:
        """No frontend can be reached; nothing has been sent."""
        self._answer = None
        self._refuse(unreachable())

    def failed(self, begun: bool, reason: str) -> None:
        """The frontend has gone before the end of the answer; ``begun``: bytes of it have come."""
        self._answer = None
        if self._transport is None:
            return
        logger.warning("request %s: a frontend did not finish its answer: %s", self._request_id, reason)
        if begun:
            self._close()  # the missing end tells the client
        else:
            self._refuse(no_answer(reason))

    def answered(self, closes: bool) -> None:
        """Go on to the next request; ``closes``: the answer's end is that of the connection."""
        self._answer = None
        self._keep_alive = self._keep_alive and not closes
        if self._transport is None:
            return
        has_next = self._intake.has_next
        if not self._keep_alive or self._door.draining or (self._is_half_closed and not has_next):
            self._close()
            return
        self._intake.begin_next()
        self._answering = False
        if self._holds_back:
            self._holds_back = False
            self._transport.resume_reading()
        if has_next:
            self._expect(self._door.options.header_timeout_s)
            self._loop.call_soon(self._advance)  # not deeper into the stack with each of them
        else:
            self._expect_reader(self._door.options.idle_timeout_s)
            self._door.waits(self)

    def refused(self, refused: Refused) -> None:
        """Answer with an error; nothing of the answer has been sent."""
        self._answer = None
        self._refuse(refused)

    @property
    def _request_id(self) -> str:
        return self._intake.request_id.decode()

    def _logged_error(self) -> Refused:
        """`internal_error`, with the exception that is handled in the log."""
        logger.exception("request %s failed", self._request_id)
        return internal_error()

    def _refuse(self, refused: Refused) -> None:
        """Answer with an error; the connection is kept if the request has been read to its end."""
        if self._transport is None:
            return
        logger.info("refused: %d %s", refused.status, refused.message)
        keep_alive = self._answering and self._keep_alive and not self._door.draining
        body = error_body(refused, self._intake.error_form, self._request_id)
        document = Document(b"application/json", body, refused.headers)
        self.received(self.written(refused.status, document, keep_alive=keep_alive))
        if self._answering:
            self.answered(closes=False)
        elif self._is_half_closed:
            self._close()
        else:  # a reset would take the error from a client that goes on sending
            self._stop_reading(REFUSED_S)
            if self._transport.can_write_eof():
                self._transport.write_eof()

    # The connection.

    def _try_client(self) -> bool:
        """Write to a client that sends no more, whether it is still there or not; False at the end
        of its answer.
        """
        if not self._answering or self._is_closing or self._transport is None:
            return False
        filler = INTERIM if self._answer is None else self._answer.filler()
        head = self._intake.head
        is_understood = head is not None and (head.version == b"1.1" or filler is not INTERIM)
        if filler is not None and is_understood and not self._paused:
            self._transport.write(filler)
        return True

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""
        self._keep_alive = False
        if not self._intake.has_begun and self._transport is not None:
            self._close()

    def abort_if_idle(self) -> bool:
        """Close at once unless a request is being read or answered, or the client still reads the
        answer; whether it closes.
        """
        transport = self._transport
        if self._answering or self._intake.has_begun or transport is None or transport.get_write_buffer_size():
            return False
        self._answering, self._is_closing = True, True
        self._door.waits_no_more(self)
        transport.abort()
        return True

    def _close(self) -> None:
        """Close once everything has been sent."""
        assert self._transport is not None
        self._stop_reading(self._door.options.send_timeout_s)
        self._transport.close()

    def _stop_reading(self, seconds: float) -> None:
        """Take no further request; the connection has so long to end."""
        self._answering, self._is_closing = True, True
        self._door.waits_no_more(self)
        self._intake.free_body()
        self._expect_reader(seconds)

    def _expect_reader(self, seconds: float) -> None:
        """Wait so long for the client to read, or to send its next request."""
        self._unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        self._expect(seconds)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _late(self) -> None:
        """Close the connection unless the client reads, with an error if a request has begun."""
        if self._intake.has_begun and not self._answering:
            self._refuse(Refused(408, "the request took too long to arrive"))
        elif self._transport is not None and 0 < self._transport.get_write_buffer_size() < self._unsent:
            self._expect_reader(self._door.options.send_timeout_s)
        else:
            self.abort()


def protocol_factory(door: FrontDoor) -> Callable[[], ClientConnection]:
    """Maker of the protocol of each connection, for `asyncio.loop.create_server`."""
    return lambda: ClientConnection(door)
