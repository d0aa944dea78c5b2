"""Ids of requests: on every answer, and apart for clients with different API keys."""

from __future__ import annotations

import asyncio
import re
import uuid

import pytest
from test_frontdoor_server import get, house, post, say_ok

SENT = re.compile(rb"^x-dynamo-request-id: (.*?)\r$", re.MULTILINE | re.IGNORECASE)
ANSWERED = re.compile(rb"^x-request-id: (.*?)\r$", re.MULTILINE)
OWN = "e8b69e44-0000-4000-8000-000000000001"


async def test_keys_keep_ids_apart() -> None:
    async with house(say_ok, keys=["a", "b"]) as at:
        for key in ("a", "b", "a"):
            answer = await at.ask(
                post(b'{"model": "m", "messages": []}', f"Authorization: Bearer {key}", f"X-Dynamo-Request-Id: {OWN}")
            )
            assert answer.endswith(b"{}")
        first, second, third = (SENT.findall(request) for request in at.frontends[0].requests)
    assert first == third != second
    assert len(first) == 1
    assert str(uuid.UUID(first[0].decode())) != OWN


async def test_without_keys_an_id_stays() -> None:
    async with house(say_ok) as at:
        await at.ask(post(b'{"model": "m", "messages": []}', f"X-Dynamo-Request-Id: {OWN}"))
        assert SENT.findall(at.frontends[0].requests[0]) == [OWN.encode()]


async def test_what_is_asked_again_has_not_the_clients_id() -> None:
    """Its first request, which failed, may still be under way at a worker, under that id."""

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Error\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with house(fail) as at:
        await at.ask(post(b'{"model": "m", "messages": [], "n": 2}', f"X-Dynamo-Request-Id: {OWN}"))
        sent = [SENT.findall(request) for request in at.frontends[0].requests]
    assert sorted(sent) == [[], [], [OWN.encode()]]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/v1/logits_processors", "X-Request-Id: mine"), 200),
        (get("/v1/nothing", "X-Request-Id: mine"), 404),
        (post(b"[]", "X-Request-Id: mine"), 400),
        (get("/health", "X-Request-Id: mine"), 200),
    ],
)
async def test_every_answer_has_the_clients_id(request_bytes: bytes, status: int) -> None:
    async with house(say_ok) as at:
        answer = await at.ask(request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert ANSWERED.findall(answer) == [b"mine"]


@pytest.mark.parametrize("header", ["X-A: 1", f"X-Request-Id: {'a' * 201}", "X-Request-Id: a b", "X-Request-Id:"])
async def test_else_it_has_a_new_one(header: str) -> None:
    async with house(say_ok) as at:
        ids = [ANSWERED.findall(await at.ask(get("/v1/nothing", header))) for _ in range(2)]
        await at.ask(get("/v1/models", header))
        sent = ANSWERED.findall(at.frontends[0].requests[0])
    assert all(len(each) == 1 and uuid.UUID(each[0].decode()) for each in [*ids, sent])
    assert ids[0] != ids[1]


async def test_the_log_names_a_request_that_a_frontend_has_broken(caplog: pytest.LogCaptureFixture) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with house(break_off) as at:
        await at.ask(get("/v1/models", "X-Request-Id: mine"))
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == ["request mine: a frontend did not finish its answer: it closed the connection"]


async def test_bytes_that_are_no_request_have_an_id_too() -> None:
    async with house() as at:
        assert len(ANSWERED.findall(await at.ask(b"\x00\r\n\r\n"))) == 1
