"""Handlers of the front door: one request, one answer, whatever happens to either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from test_frontdoor_server import House, Script, chunked, error_of, get, house, post

from worker.frontdoor import client_connection, routes
from worker.frontdoor.asking import ask
from worker.frontdoor.chat_stream import assembled, chat
from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.exchange import Exchange, Handler
from worker.frontdoor.routes import Routes, handled
from worker.requests.refusals import REFUSAL, WANTS_REFUSAL

PATH = "/v1/things/{id}"
FIELDS = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
WAIT_S = 100.0


def chunk_of(text: str, **choice: Any) -> dict[str, Any]:
    made = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": [made]}


CHUNKS = [
    chunk_of("Hel"),
    chunk_of("lo", finish_reason="stop"),
    {**chunk_of(""), "choices": [], "usage": USAGE},
]


def event(content: Any) -> bytes:
    return chunked(b"data: " + encoded(content) + b"\n\n")


def says(*content: Any, end: bytes = b"0\r\n\r\n") -> Script:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(event, content)) + end)
        await writer.drain()

    return say


@contextlib.asynccontextmanager
async def serving(
    handler: Handler, monkeypatch: pytest.MonkeyPatch, *scripts: Script, errors: Any = "openai", **options: Any
) -> AsyncIterator[House]:
    """A front door in which ``handler`` answers `PATH`."""
    row = handled(PATH, ("GET", "POST"), "Things.", errors)
    monkeypatch.setattr(routes, "ROUTES", (*routes.ROUTES, row))
    table = {(method, PATH): handler for method in row.methods}
    monkeypatch.setattr(client_connection, "HANDLERS", table)
    async with house(*scripts, **options) as at:
        assert isinstance(at.door.routes, Routes)
        yield at


def thing(body: Any = FIELDS, *headers: str) -> bytes:
    return post(encoded(body), *headers, path="/v1/things/a-1?b=%20c")


async def test_a_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def handle(exchange: Exchange) -> None:
        seen.append((exchange.names, exchange.query, exchange.fields(), exchange.request_id))
        await exchange.answer(201, {"é": 1})

    async with serving(handle, monkeypatch) as at:
        head, _, body = (await at.ask(thing(FIELDS, "X-Request-Id: mine"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 201 Created\r\n")
    assert b"x-request-id: mine" in head
    assert json.loads(body) == {"é": 1}
    assert seen == [({"id": "a-1"}, {"b": " c"}, FIELDS, "mine")]


@pytest.mark.parametrize(
    ("request_bytes", "param"),
    [(thing([]), None), (post(b'{"a": 1, "a": 2}', path="/v1/things/b"), "a"), (get("/v1/things/a?b=1&b=2"), "b")],
    ids=["list", "twice", "query"],
)
async def test_a_bad_request_is_refused(
    request_bytes: bytes, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.answer(200, [exchange.query, exchange.fields()])

    async with serving(handle, monkeypatch) as at:
        status, error = error_of(await at.ask(request_bytes))
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("line", [b"", b"Content-Type: text/plain\r\n", b"Content-Type: application/jso\r\n"])
async def test_a_body_of_another_type_is_refused(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of any origin may send one without asking first."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer(200, exchange.fields())

    async with serving(handle, monkeypatch) as at:
        asked = thing().replace(b"Content-Type: application/json\r\n", line)
        status, error = error_of(await at.ask(asked))
        assert (await at.ask(thing().replace(b"/json", b"/JSON; charset=utf-8"))).startswith(b"HTTP/1.1 200 ")
    assert (status, error["param"]) == (415, "content-type")


async def test_errors_have_the_form_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(exchange: Exchange) -> None:
        raise FieldRefused("a", "is bad")

    async with serving(handle, monkeypatch, errors="anthropic", keys=["k"]) as at:
        _, _, body = (await at.ask(thing(FIELDS, "X-Request-Id: r", "Authorization: Bearer k"))).partition(b"\r\n\r\n")
        status, error = error_of(await at.ask(thing()))
    error_type = "invalid_request_error"
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": error_type, "message": "a: is bad"},
        "request_id": "r",
    }
    assert (status, error["type"]) == (401, "authentication_error")


async def fails(exchange: Exchange) -> None:
    raise KeyError("secret")


async def says_nothing(exchange: Exchange) -> None:
    pass


@pytest.mark.parametrize("handler", [fails, says_nothing])
async def test_a_handler_that_fails_is_an_internal_error(
    handler: Handler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(handler, monkeypatch) as at:
        status, error = error_of(await at.ask(thing(FIELDS, "X-Request-Id: mine")))
    assert (status, error["message"]) == (500, "internal error")
    errors = [one.message for one in caplog.records if one.levelname == "ERROR"]
    assert errors == ["request mine failed"]


async def stream_chat(exchange: Exchange) -> None:
    """Answer with the chunks of a chat as events."""
    chunks = chat(exchange, exchange.fields())
    async for chunk in chunks:
        if not exchange.has_begun:
            await exchange.begin_events()
        await exchange.send(b"data: " + encoded(chunk) + b"\n\n")
    await exchange.end()


async def test_chunks_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(stream_chat, monkeypatch, says(*CHUNKS)) as at:
        answer = await at.ask(thing(FIELDS, "X-Api-Key: k", "traceparent: t", "Authorization: Bearer b"))
        (request,) = at.frontends[0].requests
    assert [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: ")] == CHUNKS
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"traceparent: t" in head
    assert b"X-Api-Key" not in head
    assert json.loads(body) == {**FIELDS, "stream": True, "stream_options": {"include_usage": True}}


async def test_chunks_make_the_whole_answer() -> None:
    whole = assembled(CHUNKS)
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert (whole["object"], whole["usage"], whole["id"]) == ("chat.completion", USAGE, "chatcmpl-1")


async def test_a_refused_field_reaches_no_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(stream_chat, monkeypatch, says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(thing({**FIELDS, "top_k": 5, "x": 1})))
        assert at.frontends[0].requests == []
    assert (status, error["param"]) == (400, "x")


def as_refused(asked: Any, field: str, problem: str) -> Any:
    """The first chunk of a request that the worker refuses: an error that says nothing, unless it
    is asked for as data.
    """
    if WANTS_REFUSAL not in (asked.get("nvext") or {}).get("annotations", ()):
        return {"error": {"message": "Internal server error", "type": "internal_server_error", "code": 500}}
    refusal = {"field": field, "message": f"{field}: {problem}"}
    choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}
    return {"id": "c", "choices": [choice], "nvext": {"engine_data": {REFUSAL: refusal}}}


def answers_error(status: int, body: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A frontend that answers with an error."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d Error\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    return answer


refuse = answers_error(400, b'{"message": "messages: too long", "type": "Bad Request", "code": 400}')


async def test_an_error_of_the_frontend_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(stream_chat, monkeypatch, refuse) as at:
        status, error = error_of(await at.ask(thing()))
    assert (status, error["param"], error["message"]) == (400, "messages", "messages: too long")


@pytest.mark.parametrize("status", [418, 499, 599])
async def test_an_error_of_any_status_is_the_answer(status: int) -> None:
    async with house(answers_error(status, b'{"message": "gone", "code": %d}' % status)) as at:
        found, error = error_of(await at.ask(post(encoded(FIELDS))))
    assert (found, error["message"]) == (status, "gone")


async def test_a_message_that_streams_lose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.4.2 makes an internal error of it, unless the worker is asked to say it as data."""
    bodies: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(json.loads(at.frontends[0].requests[-1].partition(b"\r\n\r\n")[2]))
        await says(as_refused(bodies[-1], "token_ids", "is too long"))(reader, writer)

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with serving(stream_chat, monkeypatch, answer) as at:
        status, error = error_of(await at.ask(thing({**FIELDS, "tools": tools})))
    assert (status, error["param"], error["message"]) == (400, "messages", "messages: is too long")
    assert [body.get("tools") for body in bodies] == [tools, tools]


@pytest.mark.parametrize("fails_without", [False, True])
async def test_a_picture_that_the_template_cannot_take_is_named(
    monkeypatch: pytest.MonkeyPatch, fails_without: bool
) -> None:
    """1.4.2 fails on it before a worker is asked; what fails without it too has another reason."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(at.frontends[0].requests[-1].partition(b"\r\n\r\n")[2])
        if fails_without or not isinstance(asked["messages"][0]["content"], str):
            await answers_error(500, b'{"message": "Failed to generate completions", "type": "x", "code": 500}')(
                reader, writer
            )
        else:
            await says(CHUNKS[0])(reader, writer)

    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    async with serving(stream_chat, monkeypatch, answer) as at:
        body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        status, error = error_of(await at.ask(thing(body)))
    expected = (500, None) if fails_without else (400, "messages[0].content[1].image_url.url")
    assert (status, error["param"]) == expected


@pytest.mark.parametrize(
    "problem", [b"missing field `content`", b"no variant of untagged enum ChatCompletionRequestUserMessageContent"]
)
async def test_a_message_without_content_is_named(monkeypatch: pytest.MonkeyPatch, problem: bytes) -> None:
    """Of the frontend's error, which names no message; the assistant's need no content."""
    names_none = answers_error(400, b'{"message": "Failed to deserialize: %b at line 1", "code": 400}' % problem)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "user"}]
    async with serving(stream_chat, monkeypatch, names_none) as at:
        status, error = error_of(await at.ask(thing({"model": "m", "messages": messages})))
    assert (status, error["param"]) == (400, "messages[2].content")


async def test_a_null_that_the_frontend_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names_none = answers_error(400, b'{"message": "invalid type: null, expected a boolean at line 1", "code": 400}')
    async with serving(stream_chat, monkeypatch, names_none) as at:
        status, error = error_of(await at.ask(thing({**FIELDS, "stream_options": {"continuous_usage_stats": None}})))
    assert (status, error["param"]) == (400, "stream_options.continuous_usage_stats")


async def test_a_frontend_without_a_route_has_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(stream_chat, monkeypatch, answers_error(404, b"")) as at:
        status, error = error_of(await at.ask(thing()))
    assert (status, error["type"]) == (503, "server_error")


def catching(caught: list[Refused]) -> Handler:
    """The handler of a chat whose answer fails once it has begun."""

    async def handle(exchange: Exchange) -> None:
        try:
            async for _ in chat(exchange, exchange.fields()):
                pass
        except Refused as refused:
            caught.append(refused)
            raise

    return handle


async def test_the_reason_of_an_answer_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole answers of the front door's own, and in its streams."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(at.frontends[0].requests[-1].partition(b"\r\n\r\n")[2])
        await says(CHUNKS[0], as_refused(asked, "min_tokens", "leaves no token"))(reader, writer)

    caught: list[Refused] = []
    async with serving(catching(caught), monkeypatch, answer) as at:
        status, error = error_of(await at.ask(thing()))
        assert len(at.frontends[0].requests) == 3  # the last one computes it once more
    assert (status, error["param"], error["message"]) == (400, "min_tokens", "min_tokens: leaves no token")
    assert [one.status for one in caught] == [400]


async def test_scores_that_an_empty_stream_lacks_are_an_error() -> None:
    """The event had no head before it: the answer was no HTTP."""
    asked = {**FIELDS, "stream": True, "prompt_logprobs": 1}
    async with house(says()) as at:
        status, error = error_of(await at.ask(post(encoded(asked))))
    assert (status, error["message"]) == (502, "the worker sent no log probabilities of the prompt")


async def test_a_late_error_names_a_prompt_of_ids() -> None:
    """It named the messages, which the ids stand in for."""
    error = {"error": {"message": "messages: are bad", "param": "messages", "code": 400}}
    async with house(says(CHUNKS[0], error)) as at:
        answer = await at.ask(post(encoded({"model": "m", "prompt": [4, 5], "stream": True})))
    assert b'"message":"prompt: are bad","type":"invalid_request_error","param":"prompt"' in answer


IN_STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**FIELDS, "return_token_ids": True},
    "/v1/completions": {"model": "m", "prompt": "a", "echo": True},
    "/generate": {"model": "m", "text": "a"},
    "/inference/v1/generate": {"model": "m", "token_ids": [4], "sampling_params": {}},
}


@pytest.mark.parametrize("path", IN_STREAMS)
async def test_a_stream_without_chunks_has_a_head(path: str) -> None:
    """The last event was the whole answer, which was no HTTP."""
    async with house(says()) as at:
        answer = await at.ask(post(encoded({**IN_STREAMS[path], "stream": True}), path=path))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: [DONE]\n\n" in answer


@pytest.mark.parametrize(
    ("path", "fields", "param", "ends"),
    [
        ("/v1/chat/completions", {"model": "m", "prompt": [4], "return_token_ids": True}, "prompt", False),
        ("/v1/completions", {"model": "m", "prompt": "a", "echo": True}, "prompt", False),
        ("/generate", {"input_ids": [4]}, "input_ids", True),
        ("/inference/v1/generate", {"model": "m", "token_ids": [4], "sampling_params": {}}, "token_ids", True),
    ],
)
async def test_a_late_error_is_the_last_event_of_a_stream(
    path: str, fields: dict[str, Any], param: str, ends: bool
) -> None:
    """It names the client's field; vLLM's and SGLang's clients get ``[DONE]`` behind it."""
    ours = "messages" if "chat" in path else "prompt"
    error = {"error": {"message": f"{ours}: is bad", "param": ours, "code": 400}}
    chunk = {**CHUNKS[0], "choices": [{**CHUNKS[0]["choices"][0], "text": "a", "logprobs": None}]}
    models = answers_error(200, b'{"data": [{"id": "m"}]}')

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_asked = b"/models" not in at.frontends[0].requests[-1].partition(b"\r\n")[0]
        await (says(chunk, error) if is_asked else models)(reader, writer)

    async with house(answer) as at:
        found = await at.ask(post(encoded({**fields, "stream": True}), path=path))
    assert found.startswith(b"HTTP/1.1 200 OK\r\n")
    *_, last = [line for line in found.split(b"\n") if line.startswith(b"data: {")]
    assert json.loads(last[6:])["error"]["param"] == param
    assert (b"data: [DONE]\n\n" in found) == ends
    assert found.endswith(b"0\r\n\r\n")


async def test_an_answer_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Refused] = []
    async with serving(catching(caught), monkeypatch, says(CHUNKS[0], end=b"")) as at:
        status, _ = error_of(await at.ask(thing()))
    assert (status, caught[0].status) == (502, 502)


async def test_a_client_that_leaves_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + event(CHUNKS[0]))
        assert await reader.read() == b""

    async with serving(stream_chat, monkeypatch, say) as at:
        reader, writer = await at.connect()
        writer.write(thing())
        await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
        writer.close()
        await asyncio.wait_for(at.frontends[0].gone.wait(), WAIT_S)


async def test_annotations_of_the_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        annotation = b'event: token_ids\n: "[1,2]"\n\n'
        writer.write(STREAM_HEAD + chunked(annotation) + event(CHUNKS[0]) + b"0\r\n\r\n")
        await writer.drain()

    async def handle(exchange: Exchange) -> None:
        chunks = await ask(exchange, exchange.fields())
        found = [chunk async for chunk in chunks]
        await exchange.answer(200, [chunks.annotations, len(found)])

    async with serving(handle, monkeypatch, say) as at:
        answer = await at.ask(thing())
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == [{"token_ids": "[1,2]"}, 1]
