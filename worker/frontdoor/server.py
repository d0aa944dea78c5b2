"""The front door's server: one request of a client at a time, relayed to a frontend.

An answer's bytes go from one socket to the other as they come, unchanged and at once; only its end
is looked for. A slow reader holds back the frontend, and a client that leaves ends its request
there.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Collection, Sequence
from typing import cast

from adapters.catalog import Catalog
from worker.frontdoor import playground
from worker.frontdoor.choices import Choices
from worker.frontdoor.deadline import WaitingProtocol
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.fields import TABLES, UNCHECKED
from worker.frontdoor.http import AnswerEnd, Document, answer
from worker.frontdoor.options import Options
from worker.frontdoor.request_reader import NO_HEADERS, Head, RequestReader
from worker.frontdoor.requests import METADATA_HEADER, rewritten
from worker.frontdoor.upstreams import NoUpstream, Upstream, UpstreamConnection, Upstreams

logger = logging.getLogger(__name__)

CATALOGUE = "/v1/logits_processors"
ID_HEADERS = frozenset((b"x-dynamo-request-id", b"x-request-id"))
"""Where a client may choose the id of its request."""

OPEN_PATHS = frozenset(("/health", "/live"))
"""What a probe may read without a key; the files of the playground are open, too."""

MAX_BODY_PARTS = 8192
"""Parts in which a body may come: chunks of one byte would keep the event loop busy for minutes."""

MAX_PIPELINED = 64 * 1024
"""Bytes that a client may send ahead of the answer to its request."""

BODIES_AT_ONCE = 16
"""Bodies of the largest size that are in memory at a time."""

REPEATABLE = 64 * 1024
"""Size of the largest request that may take a kept connection: it is held until its answer begins,
in case the frontend has closed that connection.
"""

LINGER_S = 5.0
"""How long a refused client may go on sending, so that it gets to read why."""


class FrontDoor:
    """What all connections share.

    Args:
        options: Limits and timeouts.
        catalog: The processors that requests may name.
        upstreams: The frontends.
        keys: API keys, of which each request must bring one; empty: none is needed.
    """

    def __init__(self, options: Options, catalog: Catalog, upstreams: Upstreams, keys: Collection[str] = ()) -> None:
        self.options = options
        self.catalog = catalog
        self.calls = options.calls
        self.upstreams = upstreams
        self.documents = {CATALOGUE: Document(b"application/json", json.dumps(catalog.as_json()).encode())}
        self._open_paths = OPEN_PATHS
        if options.playground:
            page = playground.documents()
            self.documents |= page
            self._open_paths |= page.keys()
        self.connections: set[ClientConnection] = set()
        self.body_bytes = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self._keys = [_digest(key.encode()) for key in keys]

    def authorize(self, method: str, path: str, authorization: bytes) -> None:
        """Raises `Refused` (401) if the request needs a key and does not bring one."""
        if not self._keys or (method == "GET" and path in self._open_paths):
            return
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Refused(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    def added(self, connection: ClientConnection) -> None:
        """A connection was opened."""
        self.connections.add(connection)
        self.idle.clear()

    def removed(self, connection: ClientConnection) -> None:
        """A connection was closed."""
        self.connections.discard(connection)
        if not self.connections:
            self.idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Let the answers under way finish, for so long, and close the rest."""
        self.draining = True
        self.upstreams.close()  # the frontends may be about to end, too
        for connection in list(self.connections):
            connection.close_if_idle()
        try:
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d connections closed before their answers ended", len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        self.upstreams.close()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ClientConnection(WaitingProtocol):
    """One client's connection: its requests, one after the other, and their answers.

    Args:
        door: What all connections share.
    """

    def __init__(self, door: FrontDoor) -> None:
        super().__init__()
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader()
        self._request: Head | None = None
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._path = ""
        self._keep_alive = True
        self._ahead = 0  # bytes received while a request is being answered
        self._head_begun = False
        self._answering = False
        self._lingering = False
        self._paused = False  # the client does not keep up
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: UpstreamConnection | Choices | None = None
        self._sent: bytes | None = None  # the request, if it may have to be sent again

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._door.added(self)
        if len(self._door.connections) > self._door.options.max_connections:
            self._refuse(Refused(503, "too many connections", kind="server_error"))
        else:
            self._expect(self._door.options.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._answering:
            self._ahead += len(data)
            if self._ahead > MAX_PIPELINED:
                self.abort()
                return
        elif not self._head_begun:
            self._head_begun = True
            self._expect(self._door.options.header_timeout_s)
        self._reader.feed(data)
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
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
                    if self._reader.awaits_continue:
                        self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
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

    def _begin(self, request: Head) -> None:
        self._request = request
        headers = request.headers
        closes = b"close" in headers.get(b"connection", b"").lower()
        self._keep_alive = request.version == b"1.1" and not closes and not self._door.draining
        self._expect(self._door.options.body_timeout_s)
        if not request.target.startswith(b"/"):
            raise Refused(400, "the request's target must be a path")
        method, self._path = request.method.decode(), request.target.partition(b"?")[0].decode("latin-1")
        self._door.authorize(method, self._path, headers.get(b"authorization", b""))
        if method == "POST" and self._path in UNCHECKED:
            problem = f"{self._path} is not served: fields of its requests would be dropped; use /v1/chat/completions"
            raise Refused(404, problem, code="unsupported_endpoint")
        self._check_length(int(headers.get(b"content-length", b"0")))
        if not self._rewrites():
            return
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(415, "a compressed body is not supported", "content-encoding")
        if METADATA_HEADER in headers and [name.lower() for name, _ in request.lines].count(METADATA_HEADER) > 1:
            raise FieldRefused(METADATA_HEADER.decode(), "comes twice, and Dynamo's frontend drops the second")

    def _rewrites(self) -> bool:
        return self._request is not None and self._request.method == b"POST" and self._path in TABLES

    def _check_length(self, num_bytes: int) -> None:
        limit = self._door.options.body_limit_mib * 2**20
        if num_bytes > limit:
            raise Refused(413, f"the body has more than {limit} bytes")

    def _add(self, data: bytes) -> None:
        self._body.append(data)
        self._num_bytes += len(data)
        self._door.body_bytes += len(data)
        self._check_length(self._num_bytes)
        if len(self._body) > MAX_BODY_PARTS:
            raise Refused(413, f"the body comes in more than {MAX_BODY_PARTS} parts")
        if self._door.body_bytes > BODIES_AT_ONCE * self._door.options.body_limit_mib * 2**20:
            raise Refused(503, "too many large bodies at a time", kind="server_error")

    def _free_body(self) -> None:
        self._door.body_bytes -= self._num_bytes
        self._num_bytes = 0
        self._body = []

    # The answer.

    def _answer(self) -> None:
        request = self._request
        assert request is not None
        self._answering = True
        document = self._door.documents.get(self._path)
        if document is not None:
            self._answer_document(request, document)
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        bodies: Sequence[bytes] = (body,)
        if self._rewrites():
            bodies = rewritten(
                self._path,
                body,
                request.headers,
                self._door.catalog,
                self._door.calls,
                carries_guides=self._door.options.carries_guides,
                max_bytes=self._door.options.body_limit_mib * 2**20,
            )
        if len(bodies) > 1:
            self._ask_for_choices(request, bodies)
            return
        has_body = bool(body) or b"content-length" in request.headers
        last = request.version == b"1.0" or self._door.draining
        self._relay(request.sent_on(len(bodies[0]) if has_body else None, close=last) + bodies[0])

    def _ask_for_choices(self, request: Head, bodies: Sequence[bytes]) -> None:
        """Each choice is a request of its own; the client's id is that of the first."""
        self._free_body()
        ids = (NO_HEADERS, *(ID_HEADERS for _ in bodies[1:]))
        requests = [
            request.sent_on(len(body), close=True, without=without) + body
            for body, without in zip(bodies, ids, strict=True)
        ]
        self._upstream = choices = Choices(self, requests, chunked=request.version == b"1.1")
        choices.ask(self._door.upstreams)

    def _answer_document(self, request: Head, document: Document) -> None:
        if request.method not in (b"GET", b"HEAD"):
            allow = b"allow: GET, HEAD\r\n"
            self._write(answer(405, Refused(405, "use GET").body(), keep_alive=self._keep_alive, headers=allow))
        else:
            self._write(
                answer(
                    200,
                    document.body,
                    keep_alive=self._keep_alive,
                    head_only=request.method == b"HEAD",
                    content_type=document.content_type,
                    headers=document.headers,
                )
            )
        self._next_request()

    def _relay(self, data: bytes) -> None:
        turn = self._door.upstreams.in_turn()
        if turn[0].idle and len(data) <= REPEATABLE:
            self._upstream = kept = turn[0].idle.pop()
            self._sent = data
            self._send(kept, data)
        else:
            self._connecting = self._loop.create_task(self._connect(turn, data))

    async def _connect(self, turn: Sequence[Upstream], data: bytes) -> None:
        upstream = self._upstream = UpstreamConnection()
        try:
            await self._door.upstreams.connect(turn, upstream)
        except NoUpstream:
            self.unreachable()
            return
        if self._upstream is upstream:  # it may have gone already
            self._connecting = None
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
        self._connecting = self._upstream = None
        self._refuse(Refused(503, "no frontend can be reached", kind="server_error"))

    def failed(self, begun: bool, reason: str) -> None:
        """The frontend has gone before the end of the answer; ``begun``: bytes of it have been
        passed on.
        """
        connection, data = self._upstream, self._sent
        self._upstream = self._connecting = self._sent = None
        if self._transport is None:
            return
        frontend = connection.upstream if isinstance(connection, UpstreamConnection) else None
        if frontend is not None and data is not None and not begun:
            self._connecting = self._loop.create_task(self._connect([frontend], data))
            return
        logger.warning("a frontend did not finish its answer: %s", reason)
        if begun:
            self._close()  # what came goes out; that the end is missing tells the client
        else:
            self._refuse(Refused(502, f"the frontend did not answer: {reason}", kind="server_error"))

    def _next_request(self) -> None:
        if self._transport is None:
            return
        if not self._keep_alive or self._door.draining:
            self._close()
            return
        data = self._reader.trailing
        self._reader = RequestReader()
        self._request, self._path, self._ahead, self._answering = None, "", 0, False
        self._free_body()
        self._head_begun = bool(data)
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
                headers=b"www-authenticate: Bearer\r\n" if refused.status == 401 else b"",
            )
        )
        if self._answering:
            self._next_request()
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

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""
        self._keep_alive = False
        if not self._head_begun and self._transport is not None:
            self._close()

    def _close(self) -> None:
        """Close once everything has been sent."""
        assert self._transport is not None
        self._answering, self._lingering = True, True
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
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def _late(self) -> None:
        """Close the connection, with an error if a request has begun."""
        if self._head_begun and not self._answering:
            self._refuse(Refused(408, "the request took too long to arrive"))
        else:
            self.abort()


def protocol_factory(door: FrontDoor) -> Callable[[], ClientConnection]:
    """What `asyncio.loop.create_server` calls for each connection."""
    return lambda: ClientConnection(door)
