"""Anthropic's Messages API between real sockets, before a frontend that a test scripts."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from test_frontdoor_exchange import (
    CHUNKS,
    STREAM_HEAD,
    USAGE,
    WAIT_S,
    answers_error,
    chunk_of,
    event,
    refuse,
    says,
)
from test_frontdoor_server import Script, chunked, house, post

from worker.frontdoor.encoding import encoded
from worker.frontdoor.messages import handlers, request
from worker.frontdoor.routes import COUNT_TOKENS, MESSAGES

FIELDS: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
COUNTED = {name: FIELDS[name] for name in ("model", "messages")}


def message(*headers: str, path: str = MESSAGES, **fields: Any) -> bytes:
    return post(encoded({**(FIELDS if path == MESSAGES else COUNTED), **fields}), *headers, path=path)


def whole(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in headers.items()}, json.loads(body)


def events_in(answer: bytes) -> list[tuple[str, Any]]:
    """Names and data of the events of a stream in chunks."""
    lines = answer.split(b"\n")
    names = [line.removeprefix(b"event: ").decode() for line in lines if line.startswith(b"event: ")]
    data = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
    return list(zip(names, data, strict=True))


async def test_a_whole_message() -> None:
    async with house(says(*CHUNKS)) as at:
        status, headers, body = whole(await at.ask(message("x-request-id: r-1", "anthropic-version: 2023-06-01")))
        (request,) = at.frontends[0].requests
    assert (status, headers["request-id"], headers["x-request-id"]) == (200, "r-1", "r-1")
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    assert (body["type"], body["role"], body["model"], body["id"]) == ("message", "assistant", "m", "msg_1")
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (
        USAGE["prompt_tokens"],
        USAGE["completion_tokens"],
    )
    sent = json.loads(request.partition(b"\r\n\r\n")[2])
    assert sent == {**FIELDS, "stream": True, "stream_options": {"include_usage": True}}
    assert request.startswith(b"POST /v1/chat/completions ")


async def test_a_stream() -> None:
    async with house(says(*CHUNKS)) as at:
        answer = await at.ask(message(stream=True))
        sent = json.loads(at.frontends[0].requests[0].partition(b"\r\n\r\n")[2])
    assert b"content-type: text/event-stream" in answer.lower()
    assert b"request-id: " in answer
    events = events_in(answer)
    assert all(name == data["type"] for name, data in events)
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert (text, events[-1][0]) == ("Hello", "message_stop")
    assert sent["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    async with house(says(CHUNKS[0], end=b"")) as at:
        answer = await at.ask(message("x-request-id: r", stream=True))
    name, data = events_in(answer)[-1]
    assert (name, data["error"]["type"], data["request_id"]) == ("error", "api_error", "r")
    assert answer.endswith(b"0\r\n\r\n")


async def test_a_whole_answer_that_breaks_off_is_an_error() -> None:
    async with house(says(CHUNKS[0], end=b"")) as at:
        status, _, body = whole(await at.ask(message()))
    assert (status, body["type"], body["error"]["type"]) == (502, "error", "api_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_reaches_no_frontend(stream: bool) -> None:
    async with house(says(*CHUNKS)) as at:
        tools = [{"name": "f", "input_schema": {"type": "object"}}] * 2
        status, _, body = whole(await at.ask(message(stream=stream, tools=tools, tool_choice={"type": "any"}, top_n=1)))
        assert at.frontends[0].requests == []
    assert (status, body["error"]) == (
        400,
        {
            "type": "invalid_request_error",
            "message": "top_n: is not a field of /v1/messages",
            "details": {"error_code": "unknown_parameter"},
        },
    )


async def test_a_refused_thread_is_one_that_clients_go_on_without() -> None:
    async with house(says(*CHUNKS)) as at:
        status, _, body = whole(await at.ask(message(thread={"type": "create"})))
    assert (status, body["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/batches/msgbatch_1/results", "/v1/messages/x"])
async def test_what_is_not_served_is_an_error_of_anthropic_s(path: str) -> None:
    """Its client tells the kind of error, and the request, from the form."""
    async with house(says(*CHUNKS)) as at:
        status, headers, body = whole(await at.ask(post(b"{}", path=path)))
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert body["request_id"] == headers["request-id"]


async def test_errors_of_the_chat_have_the_names_of_messages() -> None:
    async with house(says(*CHUNKS)) as at:
        status, headers, body = whole(await at.ask(message(ignore_eos=True, stop_sequences=["a"])))
    assert status == 400
    assert body["error"]["message"].startswith("stop_sequences: ")
    assert body["request_id"] == headers["request-id"]


CUT = [chunk_of("Hel"), chunk_of("lo", finish_reason="length"), {**chunk_of(""), "choices": [], "usage": USAGE}]


@pytest.mark.parametrize("form", ["field", "annotation", "header"])
@pytest.mark.parametrize(
    ("deadline", "expected"),
    [(1.0, "max_tokens"), (2.0**32, "model_context_window_exceeded"), (None, "model_context_window_exceeded")],
)
async def test_a_deadline_is_no_end_of_the_context(form: str, deadline: float | None, expected: str) -> None:
    """Clients make a conversation shorter when its context has ended."""
    selection = {"version": 1} if deadline is None else {"version": 1, "deadline": deadline}
    text, fields, headers = json.dumps(selection), dict[str, Any](), list[str]()
    if form == "field":
        fields = {"logits_processors": selection}
    elif form == "annotation":
        fields = {"nvext": {"annotations": [f"logits_processors:{text}"]}}
    else:
        headers = [f"x-dynamo-meta-logits-processors: {text}"]
    async with house(says(*CUT)) as at:
        _, _, body = whole(await at.ask(message(*headers, **fields)))
        events = events_in(await at.ask(message(*headers, **fields, stream=True)))
    assert (body["stop_reason"], events[-2][1]["delta"]["stop_reason"]) == (expected, expected)


@pytest.mark.parametrize("name", ["completion_token_ids", "prompt_token_ids", "prompt_logprobs"])
async def test_what_chats_alone_say_of_tokens_is_refused(name: str) -> None:
    """The frontend drops what it does not know, and its ids have no end token."""
    async with house(says(*CHUNKS)) as at:
        status, _, body = whole(await at.ask(message(nvext={"extra_fields": ["engine_data", name]})))
        assert at.frontends[0].requests == []
    assert (status, body["error"]["message"].partition(" is served by ")[0]) == (400, f"nvext.extra_fields: {name}")


async def test_a_body_that_is_nested_too_deep_is_refused() -> None:
    """Near the limit of recursion the chat, or the text that is made of it, is too deep first."""
    tools = [{"name": "f", "input_schema": {"type": "object", "x": "@"}}]
    found = set()
    async with house(says(*CHUNKS)) as at:
        for depth in (10, *range(960, 1000), 50_000):
            body = encoded({**FIELDS, "tools": tools}).replace(b'"@"', b"[" * depth + b"]" * depth)
            status, _, answer = whole(await at.ask(post(body, path=MESSAGES)))
            assert status == 200 or answer["error"]["message"] == "the body is nested too deep"
            found.add(status)
    assert found == {200, 400}


async def test_a_large_request_is_translated_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    translate = request.translated

    def watched(fields: Any, *, models_think: bool) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return translate(fields, models_think=models_think)

    monkeypatch.setattr(handlers, "translated", watched)
    async with house(says(*CHUNKS)) as at:
        for size in (1, 100_000):
            status, _, _ = whole(await at.ask(message(system="a" * size)))
            assert status == 200
    assert threads == {True, False}


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
async def test_errors_of_the_frontend_are_the_answer(path: str) -> None:
    async with house(refuse) as at:
        status, _, body = whole(await at.ask(message(path=path)))
    assert (status, body["error"]["message"]) == (400, "messages: too long")


async def test_a_full_queue_is_an_overload() -> None:
    async with house(answers_error(529, b'{"message": "the queue is full", "code": 529}')) as at:
        status, _, body = whole(await at.ask(message()))
    assert (status, body["error"]["type"]) == (529, "overloaded_error")


async def test_tokens_are_counted_by_the_frontend() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        annotation = b'event: token_ids\n: "[1,2,5]"\n\n'
        writer.write(STREAM_HEAD + chunked(annotation) + event(CHUNKS[0]))
        await writer.drain()
        await reader.read()  # the rest is not waited for

    async with house(say) as at:
        status, _, body = whole(await at.ask(message(path=COUNT_TOKENS, system="s")))
        sent = json.loads(at.frontends[0].requests[0].partition(b"\r\n\r\n")[2])
    assert (status, body) == (200, {"input_tokens": 3})
    assert [each["content"] for each in sent["messages"]] == ["s", "a"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["x-api-key: k"], 200),
        (["Authorization: Bearer k"], 200),
        (["x-api-key: k", "Authorization: Bearer k"], 200),
        (["x-api-key: l"], 401),
        (["x-api-key: k", "Authorization: Bearer l"], 401),
        (["x-api-key: l", "Authorization: Bearer k"], 401),
        (["x-api-key: Bearer k"], 401),
        (["Authorization: k"], 401),
        ([], 401),
    ],
)
async def test_a_key_comes_in_either_header(headers: list[str], status: int) -> None:
    async with house(says(*CHUNKS), keys=["k"]) as at:
        found, _, body = whole(await at.ask(message(*headers)))
    assert found == status
    if status == 401:
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


async def test_one_key_is_one_client_in_either_header() -> None:
    labels = []
    async with house(says(*CHUNKS), keys=["k"]) as at:
        for header in ("x-api-key: k", "Authorization: Bearer k"):
            await at.ask(message(header))
            head = at.frontends[0].requests[-1].partition(b"\r\n\r\n")[0]
            labels.append(next(line for line in head.split(b"\r\n") if line.startswith(b"x-dynamo-meta-client")))
    assert labels[0] == labels[1]


async def test_a_client_that_leaves_ends_the_request() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + event(chunk_of("a")))
        assert await reader.read() == b""

    script: Script = say
    async with house(script) as at:
        reader, writer = await at.connect()
        writer.write(message(stream=True))
        await asyncio.wait_for(reader.readuntil(b"content_block_delta"), WAIT_S)
        writer.close()
        await asyncio.wait_for(at.frontends[0].gone.wait(), WAIT_S)
