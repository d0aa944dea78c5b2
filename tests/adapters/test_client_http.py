"""Both Python clients against a server that sends what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from dynamo_logits_client import (
    AnswerFailed,
    AsyncClient,
    Client,
    ClientError,
    Refused,
    TimedOut,
    Unreachable,
    __version__,
)

CHUNK = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
FIELDS: dict[str, Any] = {"model": "m", "prompt": "p", "temperature": 0}
MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
ANSWER = {"choices": [{"index": 1, "text": "b"}, {"index": 0, "message": {"content": None}}]}


def response(content: Any, status: int = 200) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def chunked(*pieces: bytes, ends: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n" * ends


class Server:
    """A server that answers every request with the same bytes, and keeps the requests."""

    def __init__(self, sent: bytes, *, hangs: bool = False) -> None:
        self.sent = sent
        self.hangs = hangs
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.left = asyncio.Event()
        self.handlers: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.add(asyncio.create_task(self.handle(reader, writer)))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # it may leave before it has asked
            await self.answer(reader, writer)
        self.left.set()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((line, headers, body))
        writer.write(self.sent)
        if self.hangs:
            await reader.read()


@contextlib.asynccontextmanager
async def serving(sent: bytes, *, hangs: bool = False) -> AsyncIterator[tuple[Server, str]]:
    server = Server(sent, hangs=hangs)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    async with listening:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/"
    await asyncio.gather(*server.handlers)


Asking = Callable[..., Awaitable[Any]]


def sync_ask(url: str, method: str, fields: dict[str, Any], options: dict[str, Any]) -> Any:
    made = getattr(Client(url, **options), method)(**fields)
    return "".join(chunk.text for chunk in made) if method.startswith("stream") else made


async def in_a_thread(url: str, method: str, fields: dict[str, Any], **options: Any) -> Any:
    return await asyncio.to_thread(sync_ask, url, method, fields, options)


async def asynchronous(url: str, method: str, fields: dict[str, Any], **options: Any) -> Any:
    async with AsyncClient(url, **options) as client:
        if not method.startswith("stream"):
            return await getattr(client, method)(**fields)
        async with getattr(client, method)(**fields) as stream:
            return "".join([chunk.text async for chunk in stream])


async def sync_texts(url: str, texts: list[str]) -> None:
    def read() -> None:
        with Client(url).stream_completion(**FIELDS) as stream:
            texts.extend(chunk.text for chunk in stream)

    await asyncio.to_thread(read)


async def async_texts(url: str, texts: list[str]) -> None:
    async with AsyncClient(url) as client, client.stream_completion(**FIELDS) as stream:
        async for chunk in stream:
            texts.append(chunk.text)


@pytest.fixture(params=[in_a_thread, asynchronous])
def ask(request: pytest.FixtureRequest) -> Asking:
    found: Asking = request.param
    return found


@pytest.mark.parametrize(
    ("method", "fields", "path"),
    [("chat", MESSAGES, "/v1/chat/completions"), ("complete", FIELDS, "/v1/completions")],
)
async def test_a_request_and_its_answer(ask: Asking, method: str, fields: dict[str, Any], path: str) -> None:
    async with serving(response(ANSWER)) as (server, url):
        answer = await ask(url, method, fields, api_key="k", headers={"X-Request-Id": "7"})
    assert answer.texts == ["", "b"]
    assert (answer.text, answer.receipt, answer.receipts) == ("", None, ())
    ((line, headers, body),) = server.requests
    assert line == f"POST {path} HTTP/1.1"
    assert json.loads(body) == fields
    assert headers["authorization"] == "Bearer k"
    assert headers["x-request-id"] == "7"
    assert headers["user-agent"] == f"dynamo-logits-client/{__version__}"


@pytest.mark.parametrize(("method", "fields"), [("stream_chat", MESSAGES), ("stream_completion", FIELDS)])
async def test_a_stream(ask: Asking, method: str, fields: dict[str, Any]) -> None:
    async with serving(chunked(CHUNK[:9], CHUNK[9:] + CHUNK, b"data: [DONE]\n\n")) as (server, url):
        assert await ask(url, method, fields) == "aa"
    assert json.loads(server.requests[0][2]) == {**fields, "stream": True}


async def test_models_and_catalogue(ask: Asking) -> None:
    async with serving(response({"data": [{"id": "m"}], "processors": [{"name": "top_k"}]})) as (server, url):
        assert await ask(url, "models", {}) == ["m"]
        assert await ask(url, "catalogue", {}) == [{"name": "top_k"}]
    assert [line for line, _, _ in server.requests] == [
        "GET /v1/models HTTP/1.1",
        "GET /v1/logits_processors HTTP/1.1",
    ]


@pytest.mark.parametrize("method", ["complete", "stream_completion"])
@pytest.mark.parametrize(
    ("status", "body", "message", "param"),
    [
        (400, {"error": {"message": "no", "param": "n", "type": "t", "code": "c"}}, "no", "n"),
        (404, {"message": "no such model"}, "no such model", None),
        (503, b"<html>", "<html>", None),
        (500, [1], "[1]", None),
        (502, b"", "an answer without a body", None),
    ],
)
async def test_a_refusal(ask: Asking, method: str, status: int, body: Any, message: str, param: str | None) -> None:
    async with serving(response(body, status)) as (_, url):
        with pytest.raises(Refused) as refused:
            await ask(url, method, FIELDS)
    error = refused.value
    assert (error.status, error.message, error.param, str(error)) == (status, message, param, f"{status}: {message}")


async def test_what_is_no_answer(ask: Asking) -> None:
    for body in (b"[]", b"no"):
        async with serving(response(body)) as (_, url):
            with pytest.raises(ClientError, match="expected a JSON object"):
                await ask(url, "complete", FIELDS)


async def test_a_stream_that_breaks(ask: Asking) -> None:
    for sent, kind in (
        (chunked(CHUNK), AnswerFailed),  # it ends without [DONE]
        (chunked(CHUNK, ends=False), ClientError),  # the connection breaks
        (chunked(CHUNK, b'data: {"error":{"message":"late","param":null}}\n\n'), AnswerFailed),
    ):
        async with serving(sent) as (_, url):
            with pytest.raises(kind):
                await ask(url, "stream_completion", FIELDS)


@pytest.mark.parametrize("ask_in_pieces", [sync_texts, async_texts])
async def test_what_came_before_an_error(ask_in_pieces: Callable[[str, list[str]], Awaitable[None]]) -> None:
    texts: list[str] = []
    async with serving(chunked(CHUNK + CHUNK + b'data: {"error":{"message":"late"}}\n\n')) as (_, url):
        with pytest.raises(AnswerFailed, match="late"):
            await ask_in_pieces(url, texts)
    assert texts == ["a", "a"]


async def test_a_break_behind_the_end_of_an_answer(ask: Asking) -> None:
    async with serving(chunked(CHUNK, b"data: [DONE]\n\n", ends=False)) as (_, url):
        assert await ask(url, "stream_completion", FIELDS) == "a"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a/v1", ("a", 80)),
        ("http://a:8000/v1", ("a", 8000)),
        ("http://[::1]/v1", ("::1", 80)),
        ("https://[2001:db8::2]/v1", ("2001:db8::2", 443)),
    ],
)
def test_where_a_client_connects(url: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def refuse(to: tuple[str, int], *_: object, **__: object) -> None:
        asked.append(to)
        raise ConnectionRefusedError

    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(Unreachable, match=f"^{re.escape(url)}/models: ConnectionRefusedError$"):
        Client(url).models()
    assert asked == [address]


async def test_a_wait_for_a_connection_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = httpx.Limits(max_connections=1)
    monkeypatch.setattr(httpx, "AsyncClient", functools.partial(httpx.AsyncClient, limits=one))
    async with serving(chunked(CHUNK)) as (_, url), AsyncClient(url, timeout_s=0.2) as client:
        async with client.stream_completion(**FIELDS):  # it has the connection
            other = asyncio.create_task(client.models())
            await asyncio.sleep(0.3)
            assert not other.done()
        with pytest.raises(ClientError, match="expected a JSON object"):
            await other


async def test_an_error_of_httpx_without_a_message() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("")

    async with httpx.AsyncClient(transport=httpx.MockTransport(fail)) as http:
        with pytest.raises(Unreachable, match=r"^http://a/v1/models: ReadError$"):
            await AsyncClient("http://a/v1", http=http).models()


async def test_a_server_that_cannot_be_reached(ask: Asking) -> None:
    async with serving(b"") as (_, url):
        with pytest.raises(Unreachable):
            await ask(url, "complete", FIELDS)  # it hangs up
    with pytest.raises(Unreachable):
        await ask(url, "complete", FIELDS)  # it is gone


@pytest.mark.parametrize(("method", "sent"), [("complete", b""), ("stream_completion", chunked(CHUNK, ends=False))])
async def test_a_server_that_sends_nothing(ask: Asking, method: str, sent: bytes) -> None:
    async with serving(sent, hangs=True) as (_, url):
        with pytest.raises(TimedOut, match="nothing arrived in time"):
            await ask(url, method, FIELDS, timeout_s=0.05)


async def test_a_stream_that_is_left_is_cancelled() -> None:
    async with serving(chunked(CHUNK, CHUNK, ends=False), hangs=True) as (server, url):

        def leave() -> None:
            with Client(url).stream_completion(**FIELDS) as stream:
                for _ in stream:
                    return

        await asyncio.to_thread(leave)
        await server.left.wait()
    async with serving(chunked(CHUNK, CHUNK, ends=False), hangs=True) as (server, url), AsyncClient(url) as client:
        async with client.stream_completion(**FIELDS) as stream:
            async for _ in stream:
                break
        await server.left.wait()


@pytest.mark.parametrize(
    ("fields", "kind"), [({"stream": True}, ValueError), ({"top_p": float("nan")}, ValueError), ({"x": {1}}, TypeError)]
)
async def test_what_is_no_request(ask: Asking, fields: dict[str, Any], kind: type[Exception]) -> None:
    for method in ("complete", "stream_completion"):
        with pytest.raises(kind):
            await ask("http://127.0.0.1:9/v1", method, {**FIELDS, **fields})


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/v1", "ftp://a/v1", "http:///v1", "http://a/v1?b=c", "http://a:99999/v1", "http://[::1", ""]
)
def test_what_is_no_address(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="base_url: expected http://host:port/v1"):
            kind(url)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"base_url": 5}, "base_url: expected http://host:port/v1"),
        ({"api_key": "a\nb"}, "api_key: expected printable ASCII"),
        ({"api_key": "\u20ac"}, "api_key: expected printable ASCII"),
        *[
            ({"timeout_s": seconds}, "timeout_s: expected seconds above 0")
            for seconds in (0, -1, "60", None, True, float("nan"), float("inf"), 1e300)
        ],
    ],
)
def test_options_that_no_request_could_have(options: dict[str, Any], problem: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=f"^{problem}"):
            kind(**options)


async def test_an_httpx_client_of_the_callers_own() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=ANSWER)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        async with AsyncClient("https://example.org/v1", http=http) as client:
            assert (await client.complete(**FIELDS)).texts == ["", "b"]
        assert not http.is_closed
    assert str(seen[0].url) == "https://example.org/v1/completions"


@pytest.mark.parametrize("error", [httpx.ConnectError("elsewhere"), httpx.ReadTimeout("elsewhere")])
async def test_a_callers_own_error_is_not_the_servers(error: httpx.TransportError) -> None:
    """One of httpx, raised within the block of a stream."""

    async def fail(url: str) -> None:
        async with AsyncClient(url) as client, client.stream_completion(**FIELDS) as stream:
            async for _ in stream:
                raise error

    async with serving(chunked(CHUNK, CHUNK, b"data: [DONE]\n\n")) as (_, url):
        with pytest.raises(type(error), match="elsewhere"):
            await fail(url)


async def test_a_stream_is_read_within_its_block() -> None:
    stream = AsyncClient().stream_completion(**FIELDS)
    with pytest.raises(RuntimeError, match="within its async with block"):
        await anext(aiter(stream))
