"""One client's connection: its requests, one after the other, relayed to a frontend.

An answer's bytes go from one socket to the other as they come, unchanged and at once; only its end
is looked for. A slow reader holds back the frontend, and a client that leaves ends its request
there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from worker.frontdoor.bodies import Body
from worker.frontdoor.choices import Choices
from worker.frontdoor.deadline import WaitingProtocol
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.http import INTERIM, AnswerEnd, Document, answer
from worker.frontdoor.request_reader import CLIENT_HEADER, NO_HEADERS, Head, RequestReader
from worker.frontdoor.requests import METADATA_HEADER
from worker.frontdoor.rewriting import AT_ONCE
from worker.frontdoor.routes import Route
from worker.frontdoor.summaries import Summary, health, metrics
from worker.frontdoor.upstreams import NoUpstream, Upstream, UpstreamConnection

if TYPE_CHECKING:
    from worker.frontdoor.server import FrontDoor

logger = logging.getLogger(__name__)

ID_HEADERS = frozenset((b"x-dynamo-request-id", b"x-request-id"))
"""Where a client may choose the id of its request."""

MAX_PIPELINED = 64 * 1024
"""Bytes that are read of what a client sends ahead of the answer to its request."""

REPEATABLE = 64 * 1024
"""Size of the largest request that may take a kept connection: it is held until its answer begins,
in case the frontend has closed that connection.
"""

LINGER_S = 5.0
"""How long a refused client may go on sending, so that it gets to read why."""

PROBES_S = (0.25, 0.25, 5.0)
"""Times until a client that sends no more is tried, the last one again and again. It may have left,
and only what is sent to it shows that.
"""


class ClientConnection(WaitingProtocol):
    """One client's connection.

    Args:
        door: What all connections share.
    """

    def __init__(self, door: FrontDoor) -> None:
        super().__init__()
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._peer = b""
        self._reader = RequestReader(door.max_body)
        self._request: Head | None = None
        self._route: Route | None = None
        self._path = ""
        self._label = b""
        self._body: Body | None = None
        self._keep_alive = True
        self._awaits_continue = False
        self._head_begun = False
        self._answering = False
        self._lingering = False
        self._is_half_closed = False  # the client sends no more
        self._holds_back = False  # it has sent enough ahead
        self._paused = False  # it does not keep up
        self._task: asyncio.Task[None] | None = None  # rewrites or connects
        self._upstream: UpstreamConnection | Choices | Summary | None = None
        self._sent: bytes | None = None  # the request, if it may have to be sent again
        self._probe: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._peer = str((transport.get_extra_info("peername") or ("",))[0]).encode()
        self._door.added(self)
        if len(self._door.connections) > self._door.options.max_connections:
            self._refuse(Refused(503, "too many connections", kind="server_error"))
        else:
            self._expect(self._door.options.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        self._reader.feed(data)
        if self._answering:
            self._hold_back()
            return
        if not self._head_begun:
            self._head_begun = True
            self._expect(self._door.options.header_timeout_s)
        self._advance()

    def eof_received(self) -> bool:
        """The client sends no more, but may wait for its answer; whether the connection stays."""
        self._is_half_closed = True
        if self._lingering or not (self._answering or self._head_begun):
            return False
        if self._answering:
            self._probe_after(0)
        else:
            self._refuse(Refused(400, "the request ends before its end"))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._probe is not None:
            self._probe.cancel()
        self._free_body()
        self._drop_upstream()
        self._transport = None
        self._door.removed(self)

    def pause_writing(self) -> None:
        self._paused = True
        if self._upstream is not None:
            self._upstream.pause()
            self._expect(self._door.options.send_timeout_s)

    def resume_writing(self) -> None:
        self._paused = False
        if self._upstream is not None:
            self._expect_nothing()
            self._upstream.resume()
        else:
            self._advance()

    # The request.

    def _advance(self) -> None:
        try:
            while not (self._answering or self._paused) and self._transport is not None:
                part = self._reader.next()
                if part is None:
                    self._await_more()
                    return
                if isinstance(part, Head):
                    self._begin(part)
                elif part is RequestReader.END:
                    self._expect_nothing()
                    self._answer()
                else:
                    self._add(part)
        except Refused as refused:
            self._refuse(refused)
        except Exception:  # the request's boundary
            self._refuse(_internal_error())

    def _await_more(self) -> None:
        if self._is_half_closed and self._head_begun:
            raise Refused(400, "the request ends before its end")
        if self._body is not None:
            self._expect(self._body.left_s())
            if self._awaits_continue:
                self._awaits_continue = False
                self._write(INTERIM)

    def _begin(self, request: Head) -> None:
        self._request = request
        self._keep_alive = request.may_stay_open and not self._door.draining
        if not request.target.startswith(b"/"):
            raise Refused(400, "the request's target must be a path")
        self._path = request.target.partition(b"?")[0].decode("latin-1")
        self._route, self._label = self._door.admit(request, self._path, self._peer)
        if request.num_bytes > self._door.max_body:
            raise Refused(413, f"the body has more than {self._door.max_body} bytes")
        request.check_connection_options()
        self._body = self._door.bodies.begin(self._refuse)
        self._awaits_continue = request.awaits_continue
        if self._route.by != "checked":
            return
        if request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(415, "a compressed body is not supported", "content-encoding")
        if len(request.values(METADATA_HEADER)) > 1:
            raise FieldRefused(METADATA_HEADER.decode(), "comes twice, and Dynamo's frontend drops the second")

    def _add(self, data: bytes) -> None:
        assert self._body is not None
        self._body.add(data)

    def _free_body(self) -> None:
        if self._body is not None:
            self._body.free()
            self._body = None

    def _hold_back(self) -> None:
        """Read no more of what is sent ahead than has its place."""
        if self._reader.num_pending > MAX_PIPELINED and self._transport is not None and not self._holds_back:
            self._holds_back = True
            self._transport.pause_reading()

    # The answer.

    def _answer(self) -> None:
        request, route = self._request, self._route
        assert request is not None
        assert route is not None
        assert self._body is not None
        self._answering = True
        self._hold_back()
        if self._is_half_closed:
            self._probe_after(0)
        body = self._body.take()
        if route.by == "document":
            self._answer_with(200, self._door.documents[self._path])
        elif route.by in ("health", "metrics"):
            self._summarise(route.path)
        elif route.by == "checked" and len(body) > AT_ONCE:
            self._task = self._loop.create_task(self._rewrite_aside(request, body))
        else:
            bodies = (body,) if route.by == "frontend" else self._door.rewrite(self._path, body, request)
            self._ask(request, bodies)

    async def _rewrite_aside(self, request: Head, body: bytes) -> None:
        try:
            rewritten = await self._door.rewriting.aside(partial(self._door.rewrite, self._path, body, request))
        except Exception:  # the request's boundary
            rewritten = _internal_error()
        self._task = None
        if isinstance(rewritten, Refused):
            self._refuse(rewritten)
        else:
            self._ask(request, rewritten)

    def _ask(self, request: Head, bodies: Sequence[bytes]) -> None:
        """Send the request on; each of several choices is one of its own."""
        added = b"%b: %b\r\n" % (CLIENT_HEADER, self._label)
        if len(bodies) > 1:
            self._ask_for_choices(request, bodies, added)
            return
        (body,) = bodies
        has_body = bool(body) or b"content-length" in request.headers
        last = request.version == b"1.0" or self._door.draining
        self._relay(request.sent_on(len(body) if has_body else None, close=last, added=added) + body)

    def _ask_for_choices(self, request: Head, bodies: Sequence[bytes], added: bytes) -> None:
        """The client's id is that of the first choice."""
        self._free_body()
        ids = (NO_HEADERS, *(ID_HEADERS for _ in bodies[1:]))
        requests = [
            request.sent_on(len(body), close=True, without=without, added=added) + body
            for body, without in zip(bodies, ids, strict=True)
        ]
        self._upstream = choices = Choices(self, requests, chunked=request.version == b"1.1")
        choices.ask(self._door.upstreams)

    def _summarise(self, path: str) -> None:
        self._free_body()
        sources = self._door.sources(path)
        make = health if path == "/health" else metrics(sources)
        self._upstream = summary = Summary(self, self._door.upstreams, sources, make, self._written)
        summary.ask()

    def _answer_with(self, status: int, document: Document) -> None:
        self._write(self._written(status, document))
        self._next_request()

    def _written(self, status: int, document: Document) -> bytes:
        """An answer of the front door's own."""
        return answer(
            status,
            document.body,
            keep_alive=self._keep_alive,
            head_only=self._request is not None and self._request.method == b"HEAD",
            content_type=document.content_type,
            headers=document.headers,
        )

    def _relay(self, data: bytes) -> None:
        turn = self._door.upstreams.in_turn()
        if turn[0].idle and len(data) <= REPEATABLE:
            self._upstream = kept = turn[0].idle.pop()
            self._sent = data
            self._send(kept, data)
        else:
            self._task = self._loop.create_task(self._connect(turn, data))

    async def _connect(self, turn: Sequence[Upstream], data: bytes) -> None:
        upstream = self._upstream = UpstreamConnection()
        try:
            await self._door.upstreams.connect(turn, upstream)
        except NoUpstream:
            self.unreachable()
            return
        if self._upstream is upstream:  # it may have gone already
            self._task = None
            self._send(upstream, data)

    def _send(self, upstream: UpstreamConnection, data: bytes) -> None:
        self._free_body()
        assert self._request is not None
        upstream.begin(self, AnswerEnd(self._request.method == b"HEAD"), data)

    def received(self, data: bytes) -> None:
        """Bytes of the answer."""
        self._sent = None
        if self._transport is not None:
            self._transport.write(data)

    def answered(self, closes: bool) -> None:
        """The answer is complete; ``closes``: its end is that of the connection."""
        self._upstream = None
        self._keep_alive = self._keep_alive and not closes
        self._next_request()

    def unreachable(self) -> None:
        """No frontend can be reached; nothing has been sent."""
        self._task = self._upstream = None
        self._refuse(Refused(503, "no frontend can be reached", kind="server_error"))

    def failed(self, begun: bool, reason: str) -> None:
        """The frontend has gone before the end of the answer; ``begun``: bytes of it have been
        passed on.
        """
        connection, data = self._upstream, self._sent
        self._upstream = self._task = self._sent = None
        if self._transport is None:
            return
        frontend = connection.upstream if isinstance(connection, UpstreamConnection) else None
        if frontend is not None and data is not None and not begun:
            self._task = self._loop.create_task(self._connect([frontend], data))
            return
        logger.warning("a frontend did not finish its answer: %s", reason)
        if begun:
            self._close()  # what came goes out; that the end is missing tells the client
        else:
            self._refuse(Refused(502, f"the frontend did not answer: {reason}", kind="server_error"))

    def _next_request(self) -> None:
        if self._transport is None:
            return
        data = self._reader.trailing
        if not self._keep_alive or self._door.draining or (self._is_half_closed and not data):
            self._close()
            return
        self._reader = RequestReader(self._door.max_body)
        self._request, self._route, self._path, self._answering = None, None, "", False
        self._free_body()
        self._head_begun = bool(data)
        if self._holds_back:
            self._holds_back = False
            self._transport.resume_reading()
        if data:
            self._expect(self._door.options.header_timeout_s)
            self._reader.feed(data)
            self._loop.call_soon(self._advance)  # not deeper into the stack with each of them
        else:
            self._expect(self._door.options.idle_timeout_s)

    def _refuse(self, refused: Refused) -> None:
        """Answer with an error; the connection is kept if the request has been read to its end."""
        if self._transport is None:
            return
        logger.info("refused: %d %s", refused.status, refused.message)
        self._write(
            answer(
                refused.status,
                refused.body(),
                keep_alive=self._answering and self._keep_alive and not self._door.draining,
                head_only=self._request is not None and self._request.method == b"HEAD",
                headers=refused.headers,
            )
        )
        if self._answering:
            self._next_request()
        elif self._is_half_closed:
            self._close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close once the client has, or soon: a reset would take the error from it."""
        assert self._transport is not None
        self._answering, self._lingering = True, True
        self._free_body()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._expect(LINGER_S)

    # The connection.

    def _probe_after(self, number: int) -> None:
        """Try, in a while, whether a client that sends no more is still there."""
        seconds = PROBES_S[min(number, len(PROBES_S) - 1)]
        if self._probe is not None:
            self._probe.cancel()
        self._probe = self._loop.call_later(seconds, self._try_client, number + 1)

    def _try_client(self, number: int) -> None:
        self._probe = None
        if not self._answering or self._lingering or self._transport is None:
            return
        filler = INTERIM if self._upstream is None else self._upstream.filler()
        is_understood = self._request is not None and (self._request.version == b"1.1" or filler is not INTERIM)
        if filler is not None and is_understood and not self._paused:
            self._write(filler)
        self._probe_after(number)

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""
        self._keep_alive = False
        if not self._head_begun and self._transport is not None:
            self._close()

    def _close(self) -> None:
        """Close once everything has been sent."""
        assert self._transport is not None
        self._answering, self._lingering = True, True
        self._free_body()
        self._transport.close()
        self._expect(self._door.options.send_timeout_s)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _drop_upstream(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def _late(self) -> None:
        """Close the connection, with an error if a request has begun."""
        if self._head_begun and not self._answering:
            self._refuse(Refused(408, "the request took too long to arrive"))
        else:
            self.abort()


def _internal_error() -> Refused:
    """The answer to a request that met an error of the front door's own, which the log has."""
    logger.exception("a request failed")
    return Refused(500, "internal error", kind="server_error")
