"""Web pages of other origins: which may read answers, whoever wrote the answer."""

from __future__ import annotations

import asyncio
import re

import pytest
from test_frontdoor_server import CHAT_BODY, STREAM, Script, get, house, post, say_ok, say_stream

from worker.errors import ConfigurationError
from worker.frontdoor.options import parse_options

ORIGIN = "https://app.example.com"
ALLOWED = re.compile(rb"^access-control-allow-origin: (.*?)\r$", re.MULTILINE)
PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, x-a")


async def say_byte_by_byte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for i in range(len(STREAM)):
        writer.write(STREAM[i : i + 1])
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("say", [say_stream, say_byte_by_byte])
async def test_a_forwarded_answer_is_the_same_but_for_lines(say: Script) -> None:
    async with house(say, cors_origins=(ORIGIN,)) as at:
        answer = await at.ask(post(CHAT_BODY, f"Origin: {ORIGIN}"))
    line, _, rest = answer.partition(b"\r\n")
    assert ALLOWED.findall(answer) == [ORIGIN.encode()]
    added = rest[: rest.index(STREAM.partition(b"\r\n")[2][:20])]
    assert line + b"\r\n" + rest.removeprefix(added) == STREAM


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(CHAT_BODY, f"Origin: {ORIGIN}"),
        post(b"[]", f"Origin: {ORIGIN}"),
        get("/v1/logits_processors", f"Origin: {ORIGIN}"),
        get("/v1/nothing", f"Origin: {ORIGIN}"),
        get("/version", f"Origin: {ORIGIN}"),
    ],
    ids=["forwarded", "refused", "document", "not found", "handler"],
)
async def test_every_answer_may_be_read_by_the_origin_alone(request_bytes: bytes) -> None:
    other = request_bytes.replace(ORIGIN.encode(), b"https://evil.example")
    async with house(say_ok, cors_origins=(ORIGIN,)) as at:
        assert ALLOWED.findall(await at.ask(request_bytes)) == [ORIGIN.encode()]
        refused = await at.ask(other)
    assert ALLOWED.findall(refused) == []
    assert b"vary: origin\r\n" in refused
    async with house(say_ok, cors_origins=("*",)) as at:
        assert ALLOWED.findall(await at.ask(other)) == [b"https://evil.example"]
    async with house(say_ok) as at:
        assert b"origin" not in (await at.ask(request_bytes)).partition(b"\r\n\r\n")[0]


async def test_choices_of_one_request() -> None:
    body = CHAT_BODY.replace(b"{", b'{"n": 2, ', 1)
    async with house(say_stream, cors_origins=("*",)) as at:
        assert ALLOWED.findall(await at.ask(post(body, f"Origin: {ORIGIN}"))) == [ORIGIN.encode()]


async def test_a_preflight_needs_no_key() -> None:
    ask = get("/v1/chat/completions", f"Origin: {ORIGIN}", *PREFLIGHT, method="OPTIONS")
    async with house(say_ok, cors_origins=(ORIGIN,), keys=["k"]) as at:
        answer = await at.ask(ask)
        plain = await at.ask(get("/v1/chat/completions", method="OPTIONS"))
        assert at.frontends[0].requests == []
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"access-control-allow-methods: POST\r\n" in answer
    assert b"access-control-allow-headers: authorization, x-a\r\n" in answer
    assert plain.startswith(b"HTTP/1.1 401 ")
    async with house(say_ok) as at:
        assert (await at.ask(ask)).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize("value", ["example.com", "https://a.b/path", "https://a b", "", "https://a.b:123456"])
def test_what_is_no_origin_is_an_error(value: str) -> None:
    with pytest.raises(ConfigurationError, match="--cors-origins"):
        parse_options(["--upstream", "http://127.0.0.1:1", "--cors-origins", value], {})
