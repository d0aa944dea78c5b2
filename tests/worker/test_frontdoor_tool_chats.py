"""Chats with tools at the front door: asked for as a stream of text, answered in either form."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from test_frontdoor_exchange import FIELDS, USAGE, chunk_of, says
from test_frontdoor_server import House, error_of, house, post
from written_calls import Call, written

from adapters.grammars import json_schema
from worker.frontdoor import tool_reading
from worker.frontdoor.encoding import encoded
from worker.frontdoor.field_checks import is_before_1_6

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = {**FIELDS, "tools": [TOOL]}
TEXT = "Hi. " + written("hermes", Call("f", {"a": 1}))
CHUNKS = [
    *(chunk_of(TEXT[start : start + 7]) for start in range(0, len(TEXT), 7)),
    chunk_of("", finish_reason="stop"),
    {**chunk_of(""), "choices": [], "usage": USAGE},
]
HERMES = {"tool_call_format": "hermes"}


def body_of(at: House) -> dict[str, Any]:
    """What the frontend was asked for last."""
    return json.loads(at.frontends[0].requests[-1].partition(b"\r\n\r\n")[2])  # type: ignore[no-any-return]


def events(answer: bytes) -> list[Any]:
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


async def test_a_whole_answer_is_made_of_a_stream() -> None:
    async with house(says(*CHUNKS), **HERMES) as at:
        head, _, body = (await at.ask(post(encoded(TOOLS)))).partition(b"\r\n\r\n")
        asked = body_of(at)
    assert head.startswith(b"HTTP/1.1 200 ")
    answer = json.loads(body)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi. ", "tool_calls")
    assert (answer["object"], answer["usage"]) == ("chat.completion", USAGE)
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}, {"include_usage": False}], ids=str)
async def test_usage_comes_as_the_client_asks(options: Any) -> None:
    async with house(says(*CHUNKS), **HERMES) as at:
        answer = events(await at.ask(post(encoded({**TOOLS, "stream": True, "stream_options": options}))))
    assert answer[-1] == "[DONE]"
    has_usage = [one["usage"] for one in answer[:-1] if one["choices"] == []]
    assert has_usage == ([USAGE] if options and options["include_usage"] else [])


@pytest.mark.parametrize("stream", [True, False])
async def test_only_calls_of_allowed_tools_are_read(stream: bool) -> None:
    """A call of another tool is free text to the grammar of this format, and so to the reader."""
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    text = "<function=f>{}</function><function=g>{}</function>"
    chunks = [*map(chunk_of, text), *CHUNKS[-2:]]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    fields = {**TOOLS, "tools": [TOOL, other], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    async with house(says(*chunks), tool_call_format="functionary_v3_1") as at:
        answer = await at.ask(post(encoded({**fields, "stream": stream})))
        assert body_of(at)["tools"] == [other]
    if stream:
        found = [each["choices"][0]["delta"] for each in events(answer)[:-1] if each["choices"]]
    else:
        found = [json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]]
    calls = [call["function"]["name"] for each in found for call in each.get("tool_calls") or () if call.get("id")]
    assert calls == ["g"]
    assert "".join(each.get("content") or "" for each in found) == "<function=f>{}</function>"


async def test_json_that_looks_like_a_call_is_no_call() -> None:
    """Beside tools, a ``response_format`` is that of an answer without calls."""
    text = '{"x":"<function=f>{}</function>"}'
    chunks = [*map(chunk_of, text), *CHUNKS[-2:]]
    for format_, calls in (({"type": "json_object"}, False), ({"type": "text"}, True)):
        async with house(says(*chunks), tool_call_format="functionary_v3_1") as at:
            answer = await at.ask(post(encoded({**TOOLS, "response_format": format_})))
        message = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
        assert ("tool_calls" in message) is calls
        assert (message["content"] == text) is not calls


async def test_a_forced_call_is_the_processor_s_alone() -> None:
    """The frontend is told nothing that it would parse."""
    for extra, choice in (([], "auto"), (["--dyn-tool-call-parser", "hermes"], "none")):
        options = {"dyn_tool_call_parser": "hermes"} if extra else {}
        async with house(says(*CHUNKS), **HERMES, **options) as at:
            await at.ask(post(encoded({**TOOLS, "tool_choice": "required"})))
            assert body_of(at)["tool_choice"] == choice


async def test_other_chats_are_forwarded_as_they_are() -> None:
    async def say(reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")
        await writer.drain()

    for fields in (FIELDS, {**TOOLS, "tool_choice": "none"}):
        async with house(say, **HERMES) as at:
            assert (await at.ask(post(encoded(fields)))).endswith(b"\r\n\r\nabc")
            assert "stream" not in body_of(at)


async def test_a_whole_json_answer_of_a_frontend_that_would_misread_it() -> None:
    chunks = [chunk_of('{"name": "Ann"}', finish_reason="stop"), CHUNKS[-1]]
    async with house(says(*chunks), dyn_tool_call_parser="hermes") as at:
        answer = await at.ask(post(encoded(FIELDS)))
        asked = body_of(at)
    if not is_before_1_6():  # this frontend would not
        assert "stream" not in asked
        return
    assert asked["stream"] is True
    message = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    assert message == {"role": "assistant", "content": '{"name": "Ann"}'}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_in_the_middle(stream: bool) -> None:
    """The last event of a stream, without [DONE]; the answer, if it is whole."""
    error = {"error": {"message": "lost", "type": "internal_server_error", "code": 500}}
    async with house(says(CHUNKS[0], error), **HERMES) as at:
        answer = await at.ask(post(encoded({**TOOLS, "stream": stream})))
    if stream:
        assert events(answer)[-1]["error"]["message"] == "lost"
        assert answer.endswith(b"0\r\n\r\n")
    else:
        assert error_of(answer)[0] == 500


async def test_continuous_usage_is_asked_for() -> None:
    async with house(says(*CHUNKS), **HERMES) as at:
        await at.ask(post(encoded({**TOOLS, "stream": True, "stream_options": {"continuous_usage_stats": True}})))
        assert body_of(at)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


async def test_continuous_usage_needs_usage() -> None:
    """The frontend is asked for both; the client had the counts without asking for usage."""
    chunks = [{**each, "usage": USAGE} for each in CHUNKS]
    options = {"continuous_usage_stats": True}
    async with house(says(*chunks), **HERMES) as at:
        for wanted in (False, True):
            asked = {**TOOLS, "stream": True, "stream_options": {**options, "include_usage": wanted}}
            found = events(await at.ask(post(encoded(asked))))
            assert any(isinstance(each, dict) and each.get("usage") for each in found) == wanted


async def test_a_bad_field_is_refused_before_anything_is_asked() -> None:
    async with house(says(*CHUNKS), **HERMES) as at:
        for wrong, param in (({"stream_options": {"x": 1}}, "stream_options.x"), ({"best": 1}, "best")):
            status, error = error_of(await at.ask(post(encoded({**TOOLS, "stream": True, **wrong}))))
            assert (status, error["param"]) == (400, param)
        assert at.frontends[0].requests == []


async def test_schemas_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile one takes a second, in which nobody else was answered."""
    threads, kinds = set[threading.Thread](), json_schema.argument_kinds

    def counted(*arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return kinds(*arguments)

    monkeypatch.setattr(tool_reading, "argument_kinds", counted)
    async with house(says(*CHUNKS), tool_call_format="qwen3_coder") as at:
        answer = await at.ask(post(encoded(TOOLS)))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert threads
    assert threading.main_thread() not in threads
