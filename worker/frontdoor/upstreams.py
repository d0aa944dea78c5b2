"""The frontends behind the front door: who is next, who was dead a moment ago, and connections.

A connection is kept for the next request where the answer leaves it open. One that a frontend has
closed meanwhile is found out when it is used: before anything of an answer has come, the request is
sent once more, on a new connection to the same frontend.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit
from weakref import WeakSet

from worker.arguments.values import is_host
from worker.frontdoor.answering import Client
from worker.frontdoor.deadline import WaitingProtocol
from worker.frontdoor.errors import Refused
from worker.frontdoor.http import COMMENT, INTERIM, AnswerEnd, BadAnswer, chunk

logger = logging.getLogger(__name__)

SKIP_S = 2.0
"""Seconds for which a frontend that could not be reached is tried after the others."""

SILENT_S = 5.0
"""Seconds for which a frontend that has requests to answer may send nothing before it is tried
last. An answer may take longer, so no request is given up for that.
"""

IDLE_S = 30.0
"""Seconds for which a connection is kept without a request."""

MAX_IDLE = 256
"""Connections to one frontend that are kept without a request."""


QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""A socket option of Linux."""

FULL_SEGMENT = 512
"""Bytes that the kernel may take for a full segment; it may wait for a second one, to acknowledge
both.
"""


class NoUpstream(Exception):
    """No frontend can be reached."""


@dataclass(slots=True)
class Upstream:
    """One frontend.

    Attributes:
        host: Name or address.
        port: Port of its HTTP server.
        dead_until: Monotonic time until which it is tried last.
        waiting_since: Monotonic time since which there are some, or of the last bytes from it.
        is_silent: Whether it hung when it was last looked at.
        idle: Connections without a request, the last used at the end.
        waiting: Connections whose request has no beginning of an answer yet.
    """

    host: str
    port: int
    dead_until: float = 0.0
    waiting_since: float = 0.0
    is_silent: bool = False
    idle: list[UpstreamConnection] = field(default_factory=list, compare=False, repr=False)
    waiting: set[UpstreamConnection] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, url: str) -> Upstream:
        """The frontend at ``http://host:port``. Raises `ValueError`."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme != "http" or not is_host(host) or parts.path not in ("", "/") or parts.query or parts.username:
            raise ValueError(f"must be http://host:port, got {url!r}")
        return cls(host, parts.port or 80)

    async def open(self, connection: UpstreamConnection) -> None:
        """Connect ``connection`` to it. Raises `OSError`."""
        await asyncio.get_running_loop().create_connection(lambda: connection, self.host, self.port)

    def asked(self, connection: UpstreamConnection, now: float) -> None:
        """Note that a request was sent to it."""
        if not self.waiting:
            self.waiting_since = now
        self.waiting.add(connection)

    def heard(self, connection: UpstreamConnection, now: float) -> None:
        """Note that bytes came from it."""
        self.waiting_since = now
        self.waiting.discard(connection)
        if self.is_silent:
            self.is_silent = False
            logger.warning("frontend %s answers again", self)

    def is_tried_last(self, now: float) -> bool:
        """Whether it could not be reached a moment ago, or hangs with requests to answer."""
        hangs = bool(self.waiting) and now - self.waiting_since > SILENT_S
        if hangs and not self.is_silent:
            logger.warning("frontend %s sends nothing, with %d requests to answer", self, len(self.waiting))
        self.is_silent = hangs
        return hangs or self.dead_until > now

    def keep(self, connection: UpstreamConnection) -> bool:
        """Keep a connection for the next request, if there is room."""
        has_room = len(self.idle) < MAX_IDLE
        if has_room:
            self.idle.append(connection)
        return has_room

    def drop(self, connection: UpstreamConnection) -> None:
        """Await nothing of a connection, and give it to no further request."""
        self.waiting.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def __str__(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class Reader(Protocol):
    """Reader of answers of frontends, which makes an answer of its own of them."""

    def end(self, refused: Refused) -> None:
        """The answers end before their end."""


class Upstreams:
    """Frontends in turn, the dead and the silent ones last.

    Args:
        upstreams: The frontends, at least one.
        connect_timeout_s: Seconds to wait for a connection.
        now: The clock; tests have their own.
    """

    def __init__(
        self, upstreams: Sequence[Upstream], connect_timeout_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._upstreams = list(upstreams)
        self._connect_timeout_s = connect_timeout_s
        self._now = now
        self._num_requests = 0
        self._readers: WeakSet[Reader] = WeakSet()

    def in_turn(self) -> list[Upstream]:
        """All of them, in the order in which the next request tries them."""
        if len(self._upstreams) == 1:
            return self._upstreams
        now = self._now()
        last = {id(upstream) for upstream in self._upstreams if upstream.is_tried_last(now)}
        alive = [upstream for upstream in self._upstreams if id(upstream) not in last]
        dead = [upstream for upstream in self._upstreams if id(upstream) in last]
        number, self._num_requests = self._num_requests, self._num_requests + 1
        return [*_from(alive, number), *_from(dead, number if not alive else 0)]

    async def connect(self, turn: Sequence[Upstream], connection: UpstreamConnection) -> None:
        """Connect to the first of ``turn`` that takes it; nothing has been sent.

        Raises:
            NoUpstream: none does.
        """
        for upstream in turn:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    await upstream.open(connection)
            except (TimeoutError, OSError) as error:
                self._bury(upstream, error)
            else:
                upstream.dead_until = 0.0
                connection.upstream = upstream
                return
        raise NoUpstream

    def reads(self, reader: Reader) -> None:
        """Note who reads answers, to be told of the end of the front door."""
        self._readers.add(reader)

    def end(self, refused: Refused) -> bool:
        """End the answers that are not passed on byte for byte; whether there were any."""
        readers = list(self._readers)
        for reader in readers:
            reader.end(refused)
        return bool(readers)

    def close(self) -> None:
        """Close the connections without a request."""
        for upstream in self._upstreams:
            for connection in list(upstream.idle):
                connection.abort()

    def _bury(self, upstream: Upstream, error: Exception) -> None:
        if not upstream.dead_until:  # it was alive
            logger.warning("frontend %s cannot be reached: %s", upstream, error or type(error).__name__)
        upstream.dead_until = self._now() + SKIP_S


def _from(upstreams: list[Upstream], number: int) -> list[Upstream]:
    """All of them, another one first for each number."""
    start = number % max(1, len(upstreams))
    return upstreams[start:] + upstreams[:start]


def acknowledge_at_once(connection: socket.socket) -> None:
    """Acknowledge at once what has come, and what comes.

    Dynamo's frontend leaves Nagle's algorithm on: it holds a small event back until the one before
    is acknowledged. The kernel does that when the event is read, except that it takes a connection
    that has sent something, as a request, to be in use both ways, and delays each acknowledgement
    by 40 ms. This ends that, until the next request is sent.
    """
    if QUICK_ACK is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)


class UpstreamConnection(WaitingProtocol):
    """A connection to a frontend: one request at a time, and its answer.

    Args:
        is_kept: Whether it is kept for another request; whoever has had it must not use it then.

    Attributes:
        upstream: The frontend, once it is connected.
        socket: Socket of the connection, once there is one.
    """

    def __init__(self, *, is_kept: bool = True) -> None:
        super().__init__()
        self.upstream: Upstream | None = None
        self._is_kept = is_kept
        self._client: Client | None = None
        self._end = AnswerEnd()
        self._transport: asyncio.Transport | None = None
        self.socket: socket.socket
        self._begun = False
        self._paused = False

    def begin(self, client: Client, end: AnswerEnd, data: bytes) -> None:
        """Send a request.

        Args:
            client: Receiver of the answer.
            end: Finder of its end.
            data: The request.
        """
        self._expect_nothing()
        self._client, self._end, self._begun = client, end, False
        if self.upstream is not None:
            self.upstream.asked(self, time.monotonic())
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.socket = transport.get_extra_info("socket")
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        client = self._client
        if client is None:
            self.abort()  # nothing was asked
            return
        if self.upstream is not None:
            self.upstream.heard(self, time.monotonic())
        try:
            self._end.feed(data)
        except BadAnswer as error:
            self._fail(str(error))
            return
        if not self._begun or len(data) >= FULL_SEGMENT:
            self._begun = True
            acknowledge_at_once(self.socket)
        client.received(data)
        if self._end.complete and self._client is client:  # which may have ended it
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._client is None:
            self.abort()
        elif self._end.until_close and exc is None:
            self._finish()
        else:
            self._fail(str(exc or "it closed the connection"))

    def filler(self) -> bytes | None:
        """Bytes for the client that change nothing of its answer; None if none may be sent now."""
        if not self._begun:
            return INTERIM
        return chunk(COMMENT) if self._end.is_between_events else None

    def pause(self) -> None:
        """Read no more for now."""
        if self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _late(self) -> None:
        self.abort()  # it has been kept long enough

    def abort(self) -> None:
        """Close at once: the client has gone, and so must its request. Idempotent."""
        self._client = None
        self._cancel_timer()
        if self.upstream is not None:
            self.upstream.drop(self)
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        """Keep the connection for the next request, or close it, and tell the client."""
        client, self._client = self._client, None
        if self._transport is not None:
            sent = self._transport.get_write_buffer_size() == 0 and not self._transport.is_closing()
            may_stay = self._is_kept and sent and self._end.stays_open
            if may_stay and self.upstream is not None and self.upstream.keep(self):
                self.resume()
                self._expect(IDLE_S)
            else:
                self._transport.close()
        assert client is not None
        client.answered(self._end.until_close)

    def _fail(self, reason: str) -> None:
        client = self._client
        self.abort()
        assert client is not None
        client.failed(self._begun, reason)
