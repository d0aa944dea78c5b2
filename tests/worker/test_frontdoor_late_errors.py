"""Streams that are passed on and fail once they have begun: their last event says why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frontdoor_exchange import as_refused
from test_frontdoor_server import STREAM_HEAD, chunked, house, post

from worker.frontdoor import refusal_reading
from worker.frontdoor.ending import Ending
from worker.frontdoor.server import REASONS_AT_ONCE
from worker.requests.refusals import ONLY_CHECKED, WANTS_REFUSAL

TOKENS = ["a", "b\u00e9", 'data: {"error"', "\r\n\r\nevent: error"]
NAMELESS = b'data: {"error":{"message":"Internal server error","type":"internal_server_error","code":500}}\n\n'
NAMED = b'event: error\n: "a worker died"\n\n'
DONE = b"data: [DONE]\n\n"
MESSAGES = [{"role": "user", "content": "a"}]


def token(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"id": "c", "created": 1, "choices": [choice]}).encode() + b"\n\n"


async def fail_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
    """Dynamo's frontend before a worker that answers some tokens and then gives up."""
    annotations = (asked.get("nvext") or {}).get("annotations", ())
    last: Any = as_refused(asked, "min_tokens", "leaves no token")
    writer.write(STREAM_HEAD + b"".join(chunked(token(text)) for text in TOKENS))
    await writer.drain()
    if ONLY_CHECKED not in annotations:
        writer.write(chunked(b"data: " + json.dumps(last, separators=(",", ":")).encode() + b"\n\n"))
    writer.write(chunked(DONE) + b"0\r\n\r\n")
    await writer.drain()


def fields_of(request: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.partition(b"\r\n\r\n")[2])
    return found


def events(answer: bytes) -> list[bytes]:
    """The events of a stream in chunks, of which each is whole in one."""
    _, _, body = answer.partition(b"\r\n\r\n")
    found: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        found += [each + b"\n\n" for each in body[:length].split(b"\n\n")[:-1]]
        body = body[length + 2 :]
    return found


def asks(path: str, **fields: Any) -> bytes:
    prompt = {"messages": MESSAGES} if path.endswith("chat/completions") else {"prompt": "a"}
    return post(json.dumps({"model": "m", "stream": True, **prompt, **fields}).encode(), path=path)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_last_event_has_the_reason(path: str, n: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await fail_late(reader, writer, fields_of(at.frontends[0].requests[-1]))

    async with house(answer) as at:
        found = await at.ask(asks(path, n=n))
    *before, last = events(found)
    message = {"message": "min_tokens: leaves no token", "type": "invalid_request_error", "param": "min_tokens"}
    assert json.loads(last.removeprefix(b"data: ")) == {"error": message | {"code": None}}
    assert found.endswith(b"0\r\n\r\n")
    assert found.count(b"HTTP/1.1") == 1
    texts = [json.loads(each[6:])["choices"][0]["text"] for each in before]
    assert texts == TOKENS if n == 1 else set(texts) <= set(TOKENS)


@pytest.mark.parametrize("end", [chunked(DONE) + b"0\r\n\r\n", chunked(DONE), b""])
async def test_an_error_that_does_not_come_again_goes_on(end: bytes) -> None:
    """As where a worker died: the request is answered elsewhere the next time. A frontend may go
    behind the error.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = fields_of(at.frontends[0].requests[-1])
        fails = WANTS_REFUSAL not in (asked.get("nvext") or {}).get("annotations", ())
        writer.write(STREAM_HEAD + chunked(token("a")) + chunked(NAMELESS if fails else token("b")))
        writer.write(end if fails else chunked(DONE) + b"0\r\n\r\n")
        await writer.drain()

    async with house(answer) as at:
        found = await at.ask(asks("/v1/chat/completions"))
        assert len(at.frontends[0].requests) == 3
    first, last = events(found)
    assert first == token("a")
    assert json.loads(last[6:])["error"]["message"] == "Internal server error"


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}], ids=["passed_on", "read"])
@pytest.mark.parametrize(
    ("comment", "status", "message"),
    [
        ('"a worker died"', 500, "a worker died"),
        ("a worker died", 500, "a worker died"),
        ('"{\\"message\\":\\"the queue is full\\",\\"code\\":529}"', 529, "the queue is full"),
    ],
)
async def test_an_event_that_is_an_error_is_read_alike(
    fields: dict[str, Any], comment: str, status: int, message: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        event = f"event: error\n: {comment}\n\n".encode()
        writer.write(STREAM_HEAD + chunked(event) + chunked(DONE) + b"0\r\n\r\n")
        await writer.drain()

    async with house(answer) as at:
        head, _, body = (await at.ask(asks("/v1/chat/completions", **fields))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["message"] == message


async def test_an_old_client_and_a_large_body_get_the_frontends_event() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(token("a")) + chunked(NAMELESS) + chunked(DONE) + b"0\r\n\r\n")
        await writer.drain()

    async with house(answer) as at:
        for request in (
            asks("/v1/chat/completions").replace(b"HTTP/1.1", b"HTTP/1.0"),
            asks("/v1/completions", prompt="a" * 70_000),
        ):
            assert events(await at.ask(request)) == [token("a"), NAMELESS, DONE]
        assert len(at.frontends[0].requests) == 2


async def test_many_that_fail_at_once_are_not_all_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies leaves as many behind as it had."""
    monkeypatch.setattr(refusal_reading, "_TURN_S", 0.05)
    monkeypatch.setattr(refusal_reading, "REASON_S", 2.0)
    again: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        annotations = (fields_of(at.frontends[0].requests[-1]).get("nvext") or {}).get("annotations", ())
        writer.write(STREAM_HEAD + chunked(token("a")))
        await writer.drain()
        if WANTS_REFUSAL in annotations and ONLY_CHECKED not in annotations:
            again.append("asked")
            await asyncio.sleep(5)
        writer.write(chunked(NAMELESS) + chunked(DONE) + b"0\r\n\r\n")
        await writer.drain()

    async with house(answer) as at:
        found = await asyncio.gather(*(at.ask(asks("/v1/chat/completions")) for _ in range(3 * REASONS_AT_ONCE)))
        assert len(again) == REASONS_AT_ONCE
        assert [events(each)[-1].startswith(b'data: {"error"') for each in found] == [True] * len(found)
        assert not at.door.reasons.locked()


STREAMS = st.lists(st.sampled_from([*map(token, TOKENS), b": comment\n\n"]), max_size=6)


@settings(max_examples=examples(300))
@given(before=STREAMS, error=st.sampled_from([NAMELESS, NAMED, None]), cuts=st.lists(st.floats(0, 1), max_size=6))
def test_no_byte_is_lost_before_an_error(before: list[bytes], error: bytes | None, cuts: list[float]) -> None:
    """However reads cut it. An error that comes in one piece is held, and all behind it."""
    sound = STREAM_HEAD + b"".join(map(chunked, before))
    whole = sound + (b"" if error is None else chunked(error)) + chunked(DONE) + b"0\r\n\r\n"
    places = sorted({round(cut * len(whole)) for cut in cuts} - {0, len(whole)})
    ending, passed = Ending(), b""
    for start, stop in zip([0, *places], [*places, len(whole)], strict=True):
        passed += ending.take(whole[start:stop])
    assert passed + ending.held == whole
    assert not ending.held or passed == sound
    if error is not None and not any(len(sound) < place < len(sound) + len(chunked(error)) for place in places):
        assert ending.held
    if ending.held:
        assert ending.error().status == 500
        assert ending.error().message == ("Internal server error" if error == NAMELESS else "a worker died")
