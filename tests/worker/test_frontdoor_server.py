"""The front door between real sockets: a frontend that a test scripts, and clients good and bad."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from adapters.catalog import ANNOTATION, Catalog
from worker.frontdoor import server
from worker.frontdoor.client_connection import ClientConnection, protocol_factory
from worker.frontdoor.forwarding import ForwardedRequest
from worker.frontdoor.http import AnswerEnd, BadAnswer
from worker.frontdoor.options import Options
from worker.frontdoor.routes import CATALOGUE
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.upstreams import QUICK_ACK, Upstream, UpstreamConnection, Upstreams

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CATALOG = Catalog.default()
CHAT_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}).encode()
EVENTS = [f'data: {{"n": {n}, "text": "\u00e9"}}\n\n'.encode() for n in range(50)] + [b": comment\n\ndata: [DONE]\n\n"]
WAIT_S = 100.0
BACKLOG = 1024
"""Connections that the kernel takes before the loop does: a burst of more waits for its retries."""


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Odd:  spaced \r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM = STREAM_HEAD + b"".join(map(chunked, EVENTS)) + b"0\r\n\r\n"


class Frontend:
    """One request per connection, answered by ``script``; what came is in `requests`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.gone = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            self.requests.append(head + await reader.readexactly(length))
            await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            self.gone.set()


async def say_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await writer.drain()


async def say_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    await writer.drain()


class House:
    """A front door with its frontends."""

    def __init__(self, frontends: list[Frontend], **options: Any) -> None:
        self.frontends = frontends
        keys, now = options.pop("keys", ()), options.pop("now", time.monotonic)
        engine_key = options.pop("engine_key", "")
        upstreams = tuple(Upstream("127.0.0.1", frontend.port) for frontend in frontends)
        patient = {"connect_timeout_s": WAIT_S, "header_timeout_s": WAIT_S}  # unless it is the clock that is tested
        self.options = Options(upstream=upstreams, **patient | options)
        behind = Upstreams(upstreams, self.options.connect_timeout_s, now)
        self.door = FrontDoor(self.options, CATALOG, behind, keys, engine_key)
        self.port = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(protocol_factory(self.door), "127.0.0.1", 0, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        await self.door.drain(0.01)
        await asyncio.wait_for(self.door.idle.wait(), WAIT_S)
        assert self.door.bodies.num_bytes == 0
        for frontend in self.frontends:
            await frontend.stop()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> bytes:
        """All that comes back until the connection is closed."""
        reader, writer = await self.connect()
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), WAIT_S)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def house(*scripts: Script, **options: Any) -> AsyncIterator[House]:
    frontends = [Frontend(script) for script in scripts]
    for frontend in frontends:
        await frontend.start()
    built = House(frontends, **options)
    await built.start()
    try:
        yield built
    finally:
        await built.stop()


def post(body: bytes = CHAT_BODY, *headers: str, path: str = "/v1/chat/completions", close: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "Connection: close", "", ""]).encode()


def error_of(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_an_answer_comes_byte_for_byte() -> None:
    async with house(say_stream) as at:
        assert await at.ask(post()) == STREAM


async def test_events_come_as_they_are_sent() -> None:
    """Each event is sent only once the client has the one before."""
    taken = asyncio.Semaphore(0)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for event in EVENTS:
            writer.write(chunked(event))
            await taken.acquire()
        writer.write(b"0\r\n\r\n")

    async with house(say) as at:
        reader, writer = await at.connect()
        writer.write(post())
        await asyncio.wait_for(reader.readexactly(len(STREAM_HEAD)), WAIT_S)
        for event in EVENTS:
            assert await asyncio.wait_for(reader.readexactly(len(chunked(event))), WAIT_S) == chunked(event)
            taken.release()
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b"0\r\n\r\n"
        writer.close()


async def test_headers_and_body_arrive() -> None:
    async with house(say_ok) as at:
        await at.ask(
            post(CHAT_BODY, "Authorization: Bearer abc", "traceparent: 00-1-2-01", "TE: trailers", "X-A: 1", "X-A: 2")
        )
        (request,) = at.frontends[0].requests
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == CHAT_BODY
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    for line in (b"Host: localhost", b"Authorization: Bearer abc", b"traceparent: 00-1-2-01", b"X-A: 1", b"X-A: 2"):
        assert line in lines
    assert not [line for line in lines if line.lower().startswith(b"te:")]


async def test_a_rewritten_body_has_its_own_length() -> None:
    body = json.dumps({"model": "m", "messages": [], "logit_bias": {"5": 1}}).encode()
    async with house(say_ok) as at:
        assert (await at.ask(post(body))).endswith(b"{}")
        (request,) = at.frontends[0].requests
    assert ANNOTATION.encode() in request
    assert json.loads(request.partition(b"\r\n\r\n")[2])["nvext"]["annotations"]


async def test_what_the_frontend_alone_serves_passes_as_it_is() -> None:
    async with house(say_ok) as at:
        assert (await at.ask(get("/v1/models?x=1"))).endswith(b"{}")
        assert (await at.ask(get("/v1/models/a/b%20c/ready"))).endswith(b"{}")
        assert [request.split(b"\r\n")[0] for request in at.frontends[0].requests] == [
            b"GET /v1/models?x=1 HTTP/1.1",
            b"GET /v1/models/a/b%20c/ready HTTP/1.1",
        ]


async def test_the_catalogue() -> None:
    async with house(say_ok) as at:
        answer = await at.ask(get(CATALOGUE))
        processors = json.loads(answer.partition(b"\r\n\r\n")[2])["processors"]
        assert [each["name"] for each in processors] == CATALOG.names
        assert all(each["args"]["properties"]["scope"] for each in processors)
        assert (await at.ask(get(CATALOGUE, method="HEAD"))).partition(b"\r\n\r\n")[2] == b""
        status, _ = error_of(await at.ask(post(b"{}", path=CATALOGUE)))
        assert status == 405
        assert at.frontends[0].requests == []


async def test_the_playground_is_there_if_it_is_switched_on() -> None:
    async with house(say_ok, playground=True, keys=("secret",)) as at:
        for path, kind in (("/playground?a", "text/html"), ("/playground/app.js", "text/javascript")):
            head, _, body = (await at.ask(get(path))).decode().partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 200 ")
            assert f"content-type: {kind}; charset=utf-8\r\n" in head
            assert "content-security-policy: default-src 'none'; script-src 'self';" in head
            assert body
        assert error_of(await at.ask(get("/playground/__init__.py")))[0] == 401
        assert error_of(await at.ask(post(b"{}", path="/playground")))[0] == 401
        assert error_of(await at.ask(post(b"{}", "Authorization: Bearer secret", path="/playground")))[0] == 405
        assert at.frontends[0].requests == []
    async with house(say_ok) as at:
        assert error_of(await at.ask(get("/playground")))[0] == 404


async def test_one_connection_for_many_requests() -> None:
    """Sent ahead, answered in order; a refused one does not end the connection."""
    bad = post(b'{"model": "m", "messages": [], "zzz": 1}', close=False)
    async with house(say_ok) as at:
        data = await at.ask(post(close=False) + bad + get(CATALOGUE).replace(b"close", b"keep-alive") + post())
        assert data.count(b"HTTP/1.1 ") == 4
        assert [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200", b"200"]
        assert len(at.frontends[0].requests) == 2


class Keeping(Frontend):
    """A frontend that answers many requests on one connection; each entry of `connections` is
    their number.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.connections: list[int] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.connections)
        self.connections.append(0)
        self.writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.connections[number] += 1
                await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def keeping(script: Script) -> AsyncIterator[tuple[House, Keeping]]:
    frontend = Keeping(script)
    await frontend.start()
    built = House([frontend])
    await built.start()
    try:
        yield built, frontend
    finally:
        await built.stop()


async def test_a_connection_to_a_frontend_is_kept_for_the_next_request() -> None:
    """Whether or not the client keeps its own; two at a time need two."""
    async with keeping(say_stream) as (at, frontend):
        for _ in range(3):
            assert await at.ask(post()) == STREAM
        assert await at.ask(post(close=False) + post()) == STREAM + STREAM
        assert frontend.connections == [5]
        assert not any(b"onnection" in request for request in frontend.requests)
        assert await asyncio.gather(at.ask(post()), at.ask(post())) == [STREAM] * 2  # type: ignore[comparison-overlap]
        assert sum(frontend.connections) == 7
        assert len(frontend.connections) == 2


@pytest.mark.skipif(QUICK_ACK is None, reason="TCP_QUICKACK is an option of Linux")
async def test_a_kept_connection_acknowledges_at_once() -> None:
    """The kernel would delay the acknowledgements of a connection that is used both ways."""
    assert QUICK_ACK is not None
    async with keeping(say_stream) as (at, _):
        for _ in range(5):
            assert await at.ask(post()) == STREAM
        kept = at.options.frontends[0].idle[0].socket
        assert kept.getsockopt(socket.IPPROTO_TCP, QUICK_ACK) == 1


@pytest.mark.skipif(QUICK_ACK is None, reason="TCP_QUICKACK is an option of Linux")
async def test_each_event_on_a_kept_connection_is_acknowledged_at_once() -> None:
    """The kernel leaves this state where something is sent, as a request is: not before the end."""
    assert QUICK_ACK is not None
    taken = asyncio.Semaphore(0)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for event in EVENTS:
            await taken.acquire()
            writer.write(chunked(event))
        writer.write(b"0\r\n\r\n")

    async with keeping(say) as (at, frontend):
        for _ in range(3):
            reader, writer = await at.connect()
            writer.write(post())
            taken.release()  # the head comes with the first event
            await asyncio.wait_for(reader.readexactly(len(STREAM_HEAD + chunked(EVENTS[0]))), WAIT_S)
            (client,) = at.door.connections
            assert isinstance(client, ClientConnection)
            assert isinstance(client._answer, ForwardedRequest)
            asked = client._answer.connection
            assert asked is not None
            for event in EVENTS[1:]:
                assert asked.socket.getsockopt(socket.IPPROTO_TCP, QUICK_ACK) == 1
                taken.release()
                await asyncio.wait_for(reader.readexactly(len(chunked(event))), WAIT_S)
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b"0\r\n\r\n"
            writer.close()
            while at.door.connections:
                await asyncio.sleep(0.001)
        assert frontend.connections == [3]


class Acknowledged:
    """A socket that notes what is set."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.options: list[tuple[int, int, int]] = []

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)  # type: ignore[arg-type]


@pytest.mark.skipif(QUICK_ACK is None, reason="TCP_QUICKACK is an option of Linux")
async def test_quick_acknowledgements_are_set_where_delays_would_occur() -> None:
    """For the beginning of an answer, and for what may be a full segment, but not per event."""
    taken: list[bytes] = []

    class Taker:
        def received(self, data: bytes) -> None:
            taken.append(data)

    connection, noted = UpstreamConnection(), Acknowledged()
    connection.socket = noted  # type: ignore[assignment]
    for _ in range(2):
        connection.begin(Taker(), AnswerEnd(), b"")  # type: ignore[arg-type]
        for data, num_asked in ((STREAM_HEAD, 1), (chunked(b"a" * 200), 1), (chunked(b"a" * 600), 2)):
            connection.data_received(data)
            assert noted.options == [(socket.IPPROTO_TCP, QUICK_ACK, 1)] * num_asked
        noted.options.clear()
    assert len(taken) == 6


async def test_a_closed_idle_connection_costs_a_second_attempt() -> None:
    async with keeping(say_ok) as (at, frontend):
        await at.ask(post())
        (upstream,) = at.options.frontends
        (connection,) = upstream.idle
        connection.connection_lost = lambda exc: None  # type: ignore[method-assign]  # it is not known yet
        frontend.writers[0].transport.abort()
        del connection.connection_lost
        assert (await at.ask(post())).endswith(b"{}")
        assert frontend.connections == [1, 1]


async def test_a_frontend_that_dies_on_the_second_attempt_too_is_a_502() -> None:
    answers = 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        answers += 1
        if answers > 1:
            raise ConnectionError
        await say_ok(reader, writer)

    async with keeping(say) as (at, frontend):
        assert (await at.ask(post())).endswith(b"{}")
        assert error_of(await at.ask(post()))[0] == 502
        assert frontend.connections == [2, 1]


async def test_nothing_of_an_answer_is_asked_for_twice() -> None:
    """A kept connection that dies within an answer cuts it."""
    answers = 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        answers += 1
        writer.write(STREAM if answers == 1 else STREAM[:-9])
        await writer.drain()
        if answers > 1:
            raise ConnectionError

    async with keeping(say) as (at, frontend):
        assert await at.ask(post()) == STREAM
        assert await at.ask(post()) == STREAM[:-9]
        assert frontend.connections == [2]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: Close\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
async def test_a_connection_that_the_frontend_closes_is_not_kept(answer: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with keeping(say) as (at, frontend):
        for _ in range(2):
            assert await at.ask(post()) == answer
        assert frontend.connections == [1, 1]


async def test_a_client_that_leaves_takes_its_connection_with_it() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(frontend.requests) == 1:
            await say_ok(reader, writer)
        else:
            writer.write(STREAM_HEAD + chunked(EVENTS[0]))
            assert await reader.read() == b""
            frontend.gone.set()

    async with keeping(say) as (at, frontend):
        await at.ask(post())
        reader, writer = await at.connect()
        writer.write(post())
        await asyncio.wait_for(reader.readuntil(b"\n\n"), WAIT_S)
        writer.close()
        await asyncio.wait_for(frontend.gone.wait(), WAIT_S)
        assert at.options.frontends[0].idle == []


async def test_bytes_that_nobody_asked_for_close_a_kept_connection() -> None:
    """They would be taken for the next answer."""
    async with keeping(say_ok) as (at, frontend):
        await at.ask(post())
        frontend.writers[0].write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        while at.options.frontends[0].idle:
            await asyncio.sleep(0.001)
        assert (await at.ask(post())).endswith(b"{}")


async def test_a_large_request_gets_a_new_connection() -> None:
    large = json.dumps({"model": "m", "messages": [], "user": "a" * 300_000}).encode()
    async with keeping(say_ok) as (at, frontend):
        await at.ask(post())
        assert (await at.ask(post(large))).endswith(b"{}")
        assert frontend.connections == [1, 1]


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/embeddings", "/v1/generate?stream=1"])
async def test_endpoints_that_would_drop_fields_are_not_served(path: str) -> None:
    async with house(say_ok) as at:
        status, error = error_of(await at.ask(post(b'{"model": "m", "input": "a"}', path=path)))
        assert (status, error["code"]) == (404, "unsupported_endpoint")
        assert at.frontends[0].requests == []


async def test_a_selection_in_two_headers_is_refused() -> None:
    """Dynamo's frontend takes the first, and says nothing of the second."""
    header = 'x-dynamo-meta-logits-processors: {"version": 1}'
    async with house(say_ok) as at:
        status, error = error_of(await at.ask(post(CHAT_BODY, header, header.title())))
        assert (status, error["param"]) == (400, "x-dynamo-meta-logits-processors")
        assert (await at.ask(post(CHAT_BODY, header))).endswith(b"{}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"model": "m", "input": "a"}'),
        ("/v1/messages", b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}'),
        ("/generate", b'{"model": "m", "text": "a"}'),
    ],
)
async def test_so_it_is_where_a_handler_asks_the_frontend(path: str, body: bytes) -> None:
    header = 'x-dynamo-meta-logits-processors: {"version": 1}'
    async with house(say_ok) as at:
        status, error = error_of(await at.ask(post(body, header, header, path=path)))
        assert at.frontends[0].requests == []
    assert (status, error["message"].partition(", ")[0]) == (400, "x-dynamo-meta-logits-processors: comes twice")


async def test_http_1_0_gets_what_http_1_0_can_read() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")

    async with house(say) as at:
        answer = await at.ask(b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert answer.endswith(b"until the end")
        assert at.frontends[0].requests[0].startswith(b"GET /v1/models HTTP/1.0\r\n")


async def test_a_chunked_body_without_length() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Connection: close\r\n\r\n"
    parts = chunked(CHAT_BODY[:10]) + chunked(CHAT_BODY[10:]) + b"0\r\n\r\n"
    async with house(say_ok) as at:
        assert (await at.ask(head + parts)).endswith(b"{}")
        assert b"content-length: %d\r\n" % len(CHAT_BODY) in at.frontends[0].requests[0]
        assert at.frontends[0].requests[0].endswith(CHAT_BODY)


async def test_expect_100_continue() -> None:
    async with house(say_ok) as at:
        reader, writer = await at.connect()
        head, _, body = post(CHAT_BODY, "Expect: 100-continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert first.startswith(b"HTTP/1.1 100")
        writer.write(body)
        assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"{}")
        writer.close()


async def test_a_client_that_leaves_ends_its_request_at_the_frontend() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENTS[0]))
        assert await reader.read() == b""

    async with house(say) as at:
        reader, writer = await at.connect()
        writer.write(post())
        await asyncio.wait_for(reader.readuntil(b"\n\n"), WAIT_S)
        writer.close()
        await asyncio.wait_for(at.frontends[0].gone.wait(), WAIT_S)


class Uncancelled(Upstreams):
    """Connects all the same when it is cancelled, as `asyncio.wait_for` does at the last moment."""

    async def connect(self, turn: Sequence[Upstream], connection: UpstreamConnection) -> None:
        connecting = asyncio.ensure_future(super().connect(turn, connection))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(connecting)
        await connecting


async def test_a_connection_that_comes_too_late_is_closed() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        writer.close()
        closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        upstreams = Uncancelled([Upstream(*server.sockets[0].getsockname())], WAIT_S)
        forwarded = ForwardedRequest(object(), upstreams, head_only=False, free=lambda: None)  # type: ignore[arg-type]
        forwarded.ask(post())
        await asyncio.sleep(0)
        forwarded.abort()
        await asyncio.wait_for(closed.wait(), WAIT_S)


async def test_a_client_that_leaves_before_the_answer_begins() -> None:
    arrived = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()

    async with house(say) as at:
        _, writer = await at.connect()
        writer.write(post())
        await asyncio.wait_for(arrived.wait(), WAIT_S)
        writer.close()
        await asyncio.wait_for(at.frontends[0].gone.wait(), WAIT_S)


async def test_a_frontend_that_dies_mid_stream_cuts_the_stream() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENTS[0]))
        await writer.drain()

    async with house(say) as at:
        answer = await at.ask(post(close=False))
        assert answer == STREAM_HEAD + chunked(EVENTS[0])  # and no chunk of size 0


async def test_a_frontend_that_dies_before_it_answers_is_a_502() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with house(say) as at:
        status, error = error_of(await at.ask(post()))
        assert (status, error["type"]) == (502, "server_error")


async def test_a_frontend_that_does_not_speak_http_is_a_502() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n\r\n")

    async with house(say) as at:
        assert error_of(await at.ask(post()))[0] == 502


async def test_frontends_take_turns_and_the_dead_are_skipped() -> None:
    async with house(say_ok, say_ok, say_ok, now=lambda: 0.0) as at:  # the dead stay so
        for _ in range(6):
            await at.ask(post())
        assert [len(frontend.requests) for frontend in at.frontends] == [2, 2, 2]
        await at.frontends[1].stop()
        for _ in range(6):
            assert (await at.ask(post())).endswith(b"{}")
        assert [len(at.frontends[i].requests) for i in (0, 2)] == [5, 5]


async def test_no_frontend_at_all_is_a_503() -> None:
    async with house(say_ok) as at:
        await at.frontends[0].stop()
        assert error_of(await at.ask(post()))[0] == 503


def test_the_dead_are_tried_last_and_come_back() -> None:
    clock = [0.0]
    one, two = Upstream("a", 1), Upstream("b", 2)
    upstreams = Upstreams([one, two], 1.0, now=lambda: clock[0])
    one.dead_until = 2.0
    assert [upstreams.in_turn() for _ in range(2)] == [[two, one], [two, one]]
    clock[0] = 3.0
    assert sorted(str(upstreams.in_turn()[0]) for _ in range(2)) == [str(one), str(two)]


async def test_api_keys() -> None:
    async with house(say_ok, keys=("secret", "other")) as at:
        for headers in ((), ("Authorization: Bearer wrong",), ("Authorization: Basic secret",)):
            for request in (post(CHAT_BODY, *headers), get(CATALOGUE, *headers), get("/metrics", *headers)):
                status, error = error_of(await at.ask(request))
                assert (status, error["code"]) == (401, "invalid_api_key")
        assert at.frontends[0].requests == []
        for key in ("secret", "other"):
            assert (await at.ask(post(CHAT_BODY, f"Authorization: Bearer {key}"))).endswith(b"{}")
        for method in ("GET", "HEAD"):
            assert (await at.ask(get("/health", method=method))).startswith(b"HTTP/1.1 200 ")
        twice = ("Authorization: Bearer secret", "Authorization: Bearer wrong")
        for headers in (twice, twice[::-1]):  # type: ignore[assignment]  # the frontend may read either
            assert error_of(await at.ask(post(CHAT_BODY, *headers)))[0] == 401


BIG = 2**20


async def test_body_limit() -> None:
    """Declared or not, and the client gets to read why."""
    body = json.dumps({"model": "m", "user": "a" * BIG}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with house(say_ok, body_limit_mib=1) as at:
        assert error_of(await at.ask(post(body)))[0] == 413
        assert error_of(await at.ask(head + chunked(body) + b"0\r\n\r\n"))[0] == 413
        assert error_of(await at.ask(head + b"1\r\na\r\n" * 10_000))[0] == 413
        assert at.frontends[0].requests == []


HOSTILE = {
    "no HTTP": (b"\x16\x03\x01\x02\x00" * 30 + b"\r\n\r\n", 400),
    "huge header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000, 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 20_000, 431),
    "huge target": (b"GET /" + b"a" * 100_000, 431),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "bad length": (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    "odd encoding": (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "folded": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n", 400),
    "bad chunk": (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "proxy": (b"GET http://elsewhere/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "connect": (b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "compressed": (post(CHAT_BODY, "Content-Encoding: gzip"), 415),
    "nested": (post(b'{"model": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"), 400),
    "not JSON": (post(b"{"), 400),
    "twice": (post(b'{"model": "a", "model": "b"}'), 400),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_requests_get_an_error_and_reach_nobody(name: str) -> None:
    data, expected = HOSTILE[name]
    async with house(say_ok) as at:
        status, error = error_of(await at.ask(data))
        assert (status, error["type"]) == (expected, "invalid_request_error")
        assert at.frontends[0].requests == []


async def test_random_bytes_never_reach_a_frontend_nor_stay() -> None:
    noise = random.Random(5)
    async with house(say_ok, header_timeout_s=0.05, body_timeout_s=0.05) as at:
        for _ in range(50):
            data = (
                noise.randbytes(noise.randrange(1, 400)) if noise.random() < 0.5 else post()[: noise.randrange(1, 150)]
            )
            await at.ask(data)
        assert at.frontends[0].requests == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", None), (b"POST /v1/chat/completions HTTP/1.1\r\nHost:", 408), (post()[:-5], 408)],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_slow_client_is_not_waited_for(sent: bytes, status: int | None) -> None:
    async with house(say_ok, header_timeout_s=1, body_timeout_s=1) as at:  # what is sent is read before
        reader, writer = await at.connect()
        writer.write(sent)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        assert (error_of(answer)[0] if answer else None) == status


async def test_an_unread_answer_holds_back_the_frontend_and_is_cut_off() -> None:
    sent = 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunked(b"a" * 65_536))
            await writer.drain()
            sent += 65_536

    async with house(say, send_timeout_s=0.2) as at:
        _, writer = await at.connect()
        writer.write(post())
        await asyncio.wait_for(at.frontends[0].gone.wait(), WAIT_S)
        assert sent < 64 * 2**20
        writer.close()


class Unread(asyncio.Transport):
    """A connection with so many bytes that its client has not read, each time that it is asked."""

    def __init__(self, *unread: int) -> None:
        super().__init__()
        self.unread = list(unread)
        self.aborted = asyncio.Event()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        """Take bytes of an answer."""

    def get_write_buffer_size(self) -> int:
        return self.unread.pop(0)

    def abort(self) -> None:
        self.aborted.set()


async def test_a_client_that_reads_on_gets_its_answer() -> None:
    async with house(idle_timeout_s=0.01, send_timeout_s=0.01) as at:
        transport = Unread(100, 60, 60, 30, 30, 30)  # looked at when it begins to wait, and when that is over
        connection = ClientConnection(at.door)
        connection.connection_made(transport)
        connection.data_received(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(transport.aborted.wait(), WAIT_S)
        assert transport.unread == []
        connection.connection_lost(None)


async def test_200_streams_at_a_time() -> None:
    everybody = asyncio.Event()
    arrived = 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 200:
            everybody.set()
        await everybody.wait()
        writer.write(STREAM)

    async with house(say) as at:
        assert await asyncio.gather(*(at.ask(post()) for _ in range(200))) == [STREAM] * 200


async def test_too_many_connections() -> None:
    async with house(say_ok, max_connections=1) as at:
        _, writer = await at.connect()
        writer.write(post(close=False)[:20])
        while not any(isinstance(each, ClientConnection) and each._intake.has_begun for each in at.door.connections):
            await asyncio.sleep(0.001)
        assert error_of(await at.ask(b""))[0] == 503
        writer.close()


async def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many the one goes that has waited for a request for longest."""
    monkeypatch.setattr(server, "COMING_S", 0.01)
    async with house(say_ok, max_connections=3) as at:
        idle = [await at.connect() for _ in range(3)]
        for reader, writer in idle:
            writer.write(post(close=False))
            await asyncio.wait_for(reader.readuntil(b"{}"), WAIT_S)
        idle[0][1].write(post(close=False))
        await asyncio.wait_for(idle[0][0].readuntil(b"{}"), WAIT_S)
        await asyncio.sleep(0.02)
        assert (await at.ask(post())).endswith(b"{}")
        assert await asyncio.wait_for(idle[1][0].read(), WAIT_S) == b""
        for reader, writer in (idle[0], idle[2]):
            writer.write(post())
            assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"{}")
        for _, writer in idle:
            writer.close()


async def test_of_a_burst_none_is_cut_off() -> None:
    """A connection whose request is on its way makes no room: the others are told why."""
    go_on = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await say_ok(reader, writer)

    async with house(say, max_connections=4) as at:
        asked = [asyncio.create_task(at.ask(post())) for _ in range(40)]
        async with asyncio.timeout(WAIT_S):
            while sum(task.done() for task in asked) < 36:
                await asyncio.sleep(0.001)
        go_on.set()
        answers = await asyncio.gather(*asked)
    assert Counter(answer.split()[1] for answer in answers) == {b"200": 4, b"503": 36}


async def test_room_is_not_looked_for_among_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: thousands, of which each newcomer to a full front door would ask."""
    monkeypatch.setattr(server, "COMING_S", 0.01)
    looked_at, abort_if_idle, go_on = list[bool](), ClientConnection.abort_if_idle, asyncio.Event()

    def looked(connection: ClientConnection) -> bool:
        looked_at.append(abort_if_idle(connection))
        return looked_at[-1]

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await say_ok(reader, writer)

    monkeypatch.setattr(ClientConnection, "abort_if_idle", looked)
    async with house(say, max_connections=20) as at:
        asked = [asyncio.create_task(at.ask(post())) for _ in range(20)]
        while len(at.frontends[0].requests) < 20:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        refused = [await at.ask(post()) for _ in range(20)]
        go_on.set()
        answers = await asyncio.gather(*asked)
        while at.door.connections:
            await asyncio.sleep(0.001)
        assert not at.door._waiting
    assert [answer.split()[1] for answer in (*refused, *answers)] == [b"503"] * 20 + [b"200"] * 20
    assert not looked_at


async def test_a_drain_lets_answers_finish() -> None:
    going = asyncio.Event()
    begun = STREAM_HEAD + chunked(EVENTS[0])

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await going.wait()
        writer.write(STREAM.removeprefix(begun))

    async with house(say) as at:
        idle_reader, idle_writer = await at.connect()
        reader, writer = await at.connect()
        writer.write(post(close=False))
        await asyncio.wait_for(reader.readexactly(len(begun)), WAIT_S)
        draining = asyncio.create_task(at.door.drain(WAIT_S))
        assert await asyncio.wait_for(idle_reader.read(), WAIT_S) == b""
        going.set()
        assert begun + await asyncio.wait_for(reader.read(), WAIT_S) == STREAM
        await draining
        idle_writer.close()
        writer.close()


ANSWERS = {
    "chunked": (STREAM, False),
    "trailers": (STREAM_HEAD + b"3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n", False),
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False),
    "none": (b"HTTP/1.1 204 No Content\r\n\r\n", False),
    "head": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", True),
    "after a 100": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", False),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 100_000])
def test_the_end_of_an_answer_is_found_however_it_is_cut(name: str, step: int) -> None:
    data, head_only = ANSWERS[name]
    end = AnswerEnd(head_only)
    for start in range(0, len(data), step):
        assert not end.complete
        end.feed(data[start : start + step])
    assert end.complete
    with pytest.raises(BadAnswer):
        end.feed(b"x")


@pytest.mark.parametrize("size", [b"", b"zz", b"-6", b"3 3"])
def test_a_chunk_without_a_size_is_no_answer(size: bytes) -> None:
    end = AnswerEnd()
    with pytest.raises(BadAnswer):
        end.feed(STREAM_HEAD + chunked(b"abc") + size + b"\r\nabc\r\n")


@pytest.mark.parametrize(
    "data",
    [
        STREAM_HEAD + b"-6\r\nhello",
        STREAM_HEAD + b"0x5\r\nhello",
        STREAM_HEAD + b"1_0\r\nhello",
        STREAM_HEAD + b"f" * 16 + b"\r\n",
        STREAM_HEAD + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 " + b"2" * 5000 + b" OK\r\n\r\n",
    ],
)
def test_numbers_that_are_none_of_http(data: bytes) -> None:
    """What int() makes of them would go on for ever, or end the connection without a word."""
    with pytest.raises(BadAnswer):
        AnswerEnd().feed(data)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    end = AnswerEnd()
    end.feed(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert end.until_close
    assert not end.complete
