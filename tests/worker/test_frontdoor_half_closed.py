"""Clients that send no more: those who wait get their answers, and those who left end theirs."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from test_frontdoor_server import (
    CHAT_BODY,
    EVENTS,
    STREAM,
    STREAM_HEAD,
    WAIT_S,
    House,
    chunked,
    error_of,
    get,
    house,
    post,
    say_ok,
    say_stream,
)

from worker.frontdoor.http import INTERIM

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test in an event loop of the kind; the front door's own is uvloop's."""
    return request.param  # type: ignore[no-any-return]


async def said_to(at: House, data: bytes) -> bytes:
    """The bytes that a client reads which has sent so much and sends no more."""
    reader, writer = await at.connect()
    writer.write(data)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("close", [True, False])
def test_a_half_closed_client_gets_its_answer(run: Run, close: bool) -> None:
    async def story() -> None:
        async with house(say_stream) as at:
            assert await said_to(at, post(close=close)) == STREAM
            assert (await said_to(at, get("/openapi.json"))).startswith(b"HTTP/1.1 200 ")
            assert error_of(await said_to(at, post(b'{"zzz": 1}', close=close)))[0] == 400

    run(story())


def test_all_that_it_has_sent_is_answered(run: Run) -> None:
    async def story() -> None:
        async with house(say_ok) as at:
            said = await said_to(
                at, post(close=False) + get("/openapi.json").replace(b"close", b"x") + post(close=False)
            )
            assert said.count(b"HTTP/1.1 200 ") == 3
            said = await said_to(at, post(close=False) + post(close=False)[:-1])
            assert [part[:3] for part in said.split(b"HTTP/1.1 ")[1:3]] == [b"200", b"400"]

    run(story())


@pytest.mark.parametrize("sent", [b"GET / HTT", post()[:-1], post()[:100]])
def test_half_a_request_is_refused_at_once(run: Run, sent: bytes) -> None:
    async def story() -> None:
        async with house(say_ok) as at:
            status, error = error_of(await said_to(at, sent))
            assert (status, error["message"]) == (400, "the request ends before its end")
            assert at.frontends[0].requests == []
            assert await said_to(at, b"") == b""

    run(story())


def test_a_closed_connection_is_freed_at_once(run: Run) -> None:
    """What it has read goes with it, and does not wait for a collection of cycles."""
    kept: list[weakref.ref[Any]] = []

    async def story() -> None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            kept.extend(weakref.ref(connection) for connection in at.door.connections)
            await say_stream(reader, writer)

        async with house(say) as at:
            assert await said_to(at, post()) == STREAM
            await asyncio.wait_for(at.door.idle.wait(), WAIT_S)
            await asyncio.sleep(0.05)
            assert [each() for each in kept] == [None]

    gc.disable()
    try:
        run(story())
    finally:
        gc.enable()


def test_one_that_waits_long_gets_its_answer_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that are sent meanwhile change nothing."""
    monkeypatch.setattr("worker.frontdoor.absence_probe.PROBES_S", (0.01,))

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(STREAM_HEAD)
        await asyncio.sleep(0.1)
        writer.write(chunked(EVENTS[0]))
        await asyncio.sleep(0.1)
        writer.write(chunked(EVENTS[1])[:-9])
        await asyncio.sleep(0.1)
        writer.write(chunked(EVENTS[1])[-9:] + b"0\r\n\r\n")

    async def story() -> None:
        async with house(say) as at:
            said = await said_to(at, post())
            interim, _, rest = said.partition(STREAM_HEAD)
            assert interim == INTERIM * interim.count(b"100 Continue")
            assert interim
            assert chunked(b":\n\n") in rest
            assert rest.replace(chunked(b":\n\n"), b"") == chunked(EVENTS[0]) + chunked(EVENTS[1]) + b"0\r\n\r\n"

    run(story())


def never(begin: bytes) -> Any:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        assert await reader.read() == b""

    return say


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "begin", [b"", STREAM_HEAD, STREAM_HEAD + chunked(EVENTS[0])], ids=["nothing", "head", "event"]
)
def test_one_that_left_ends_its_request_wherever_it_is(run: Run, begin: bytes, n: int) -> None:
    """The two look alike until something is sent: a stream stands still between its events."""
    body = json.dumps({**json.loads(CHAT_BODY), "n": n}).encode()

    async def story() -> None:
        async with house(never(begin)) as at:
            reader, writer = await at.connect()
            writer.write(post(body))
            while len(at.frontends[0].requests) < n:
                await asyncio.sleep(0.001)
            if begin.endswith(chunked(EVENTS[0])):  # the head goes on with the first event
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            writer.close()
            await writer.wait_closed()
            await asyncio.wait_for(at.door.idle.wait(), WAIT_S)
            await asyncio.wait_for(at.frontends[0].gone.wait(), WAIT_S)

    run(story())
