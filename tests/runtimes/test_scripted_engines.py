"""The front door before workers behind OpenEngine that a test scripts, for what real ones seldom
do.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import httpx
import pytest
import uvloop
from engine_doors import CHAT, HELLO, ScriptedWorker, ask, door, finish, token, two_tokens

from worker.errors import Draining, EngineBroken, Overloaded, RequestFailed
from worker.frontdoor.openengine.exchange import Engines, Request, answer
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import engine_error


async def scripted(tiny_model: Path, *workers: ScriptedWorker, **fields: Any) -> tuple[int, Any]:
    """Status and answer of one chat before scripted workers."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(each.serving()) for each in workers]
        client = await stack.enter_async_context(door(tiny_model, *urls))
        answer = await client.post(CHAT, json={"model": "tiny", "messages": HELLO, **fields})
        return answer.status_code, answer.json()


def failing(error: Exception, *before: wire.GenerateResponse) -> Any:
    """Script of a worker that ends a request with an error, behind some events."""

    async def generate(request: wire.GenerateRequest, context: Any) -> None:
        for event in before:
            await context.write(event)
        raise error

    return generate


def saying(error: Any) -> Any:
    """Script of a worker whose last event is an error."""

    async def generate(request: wire.GenerateRequest, context: Any) -> None:
        await context.write(wire.GenerateResponse(error=engine_error(error)))

    return generate


@pytest.mark.parametrize(
    ("generate", "status", "message"),
    [
        (saying(Overloaded("the queue is full")), 529, "the queue is full"),
        (saying(RequestFailed("a processor raised")), 400, "a processor raised"),
        (failing(Draining("leaving")), 503, "no worker is ready"),
        (lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no"), 502, "--upstream-token-file"),
        (lambda request, context: context.abort(grpc.StatusCode.INTERNAL, "odd"), 502, "INTERNAL: odd"),
        (
            lambda request, context: context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)"
            ),
            413,
            "the request is larger than the worker takes",
        ),
        (lambda request, context: context.write(token(40)), 502, "its answer has no end"),
        (lambda request, context: context.write(finish(wire.FINISH_REASON_CANCELLED)), 503, "ended the request"),
    ],
)
async def test_failures_are_told(tiny_model: Path, generate: Any, status: int, message: str) -> None:
    found, answer = await scripted(tiny_model, ScriptedWorker(generate))
    assert found == status, answer
    assert message in answer["error"]["message"]


async def test_a_worker_that_tells_no_ids_is_none_for_a_trainer(tiny_model: Path) -> None:
    status, answer = await scripted(tiny_model, ScriptedWorker(), return_token_ids=True)
    assert (status, "what is asked of tokens" in answer["error"]["message"]) == (502, True)


async def test_a_schema_that_is_nested_too_deep_is_refused(tiny_model: Path) -> None:
    """It was an internal error of the front door."""
    schema: Any = {}
    for _ in range(600):
        schema = {"not": schema}
    wanted = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    worker = ScriptedWorker()
    status, answer = await scripted(tiny_model, worker, response_format=wanted)
    assert (status, answer["error"]["message"]) == (400, "the body is nested too deep")
    assert worker.requests == []


async def test_what_another_worker_is_asked_for(tiny_model: Path) -> None:
    """Prompt and answer so far, their boundary, the seed and the budgets of the whole."""
    dies = ScriptedWorker(failing(Draining("leaving"), token(40)))
    goes_on = ScriptedWorker(failing(Draining("leaving"), token(41)), load=1)
    ends = ScriptedWorker(load=2)
    status, answer = await scripted(tiny_model, dies, goes_on, ends, max_tokens=9, stop=["x"])
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "DEDE")
    first, second, third = (each.requests[0] for each in (dies, goes_on, ends))
    begun = list(first.token_ids.ids)
    assert [list(each.token_ids.ids)[len(begun) :] for each in (first, second, third)] == [[], [40], [40, 41]]
    assert "continues" not in first.extra
    assert dict(third.extra["continues"]) == {"generated_tokens": 2, "numerics": "exact", "kv_dtype": "float32"}
    for later in (second, third):
        assert (later.request_id, later.sampling, later.stopping) == (first.request_id, first.sampling, first.stopping)
    assert first.sampling.HasField("seed")


async def test_an_answer_goes_on_in_workers_of_its_kind_alone(tiny_model: Path) -> None:
    dies, other = ScriptedWorker(failing(Draining("leaving"), token(40))), ScriptedWorker(load=1, numerics="fast")
    status, answer = await scripted(tiny_model, dies, other)
    assert (status, other.requests) == (503, [])
    assert "no worker that is ready computes the answer as it began: exact" in answer["error"]["message"]


async def test_a_request_that_ends_workers_is_not_tried_for_ever(tiny_model: Path) -> None:
    workers = [ScriptedWorker(failing(EngineBroken("the step thread died"))) for _ in range(6)]
    status, answer = await scripted(tiny_model, *workers)
    assert (status, sum(len(each.requests) for each in workers)) == (503, 4)
    assert "4 workers have ended with this request" in answer["error"]["message"]


async def test_workers_that_leave_in_order_do_not_count(tiny_model: Path) -> None:
    """A rolling restart may move an answer as often as there are workers."""
    leaving = [ScriptedWorker(failing(Draining("leaving")), load=load) for load in range(5)]
    status, answer = await scripted(tiny_model, *leaving, ScriptedWorker(load=9))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "DE")


async def test_an_answer_comes_back_to_a_worker_that_was_replaced(tiny_model: Path) -> None:
    """A rolling restart of two workers moves it there and back."""
    clients: list[httpx.AsyncClient] = []

    async def is_replaced(request: wire.GenerateRequest, context: Any) -> None:
        if len(first.requests) > 1:
            await two_tokens(request, context)
            return
        first.instance = "new"
        await context.write(token(40))
        raise Draining("leaving")

    async def leaves(request: wire.GenerateRequest, context: Any) -> None:
        while (await clients[0].get("/health")).json()["instances"] < 2:
            await asyncio.sleep(0.02)
        raise Draining("leaving")

    first, second = ScriptedWorker(is_replaced), ScriptedWorker(leaves, load=1)
    async with first.serving() as url, second.serving() as other, door(tiny_model, url, other) as client:
        clients.append(client)
        answer = await ask(client, messages=HELLO)
    assert answer["choices"][0]["message"]["content"] == "DDE"


async def test_another_engine_is_given_nothing(tiny_model: Path) -> None:
    """It may ignore keys of ``extra``, in which controls arrive."""
    foreign = ScriptedWorker(engine_name="other")
    async with foreign.serving() as url, door(tiny_model, url, num_ready=0) as client:
        async with asyncio.timeout(20):
            while (
                "it is 'other'"
                not in (answer := await client.post(CHAT, json={"model": "tiny", "messages": HELLO})).text
            ):
                await asyncio.sleep(0.05)
        assert (answer.status_code, (await client.get("/health")).status_code) == (503, 503)
    assert not foreign.requests


async def test_the_worker_with_the_fewest_requests_is_asked(tiny_model: Path) -> None:
    busy, idle = ScriptedWorker(load=5), ScriptedWorker()
    async with busy.serving() as first, idle.serving() as second, door(tiny_model, first, second) as client:
        for _ in range(6):
            await ask(client, messages=HELLO)
    assert (len(busy.requests), len(idle.requests)) == (0, 6)


async def test_a_slow_reader_holds_the_worker_back(tiny_model: Path) -> None:
    written = 0

    async def generate(request: wire.GenerateRequest, context: Any) -> None:
        nonlocal written
        while True:
            await context.write(token(*[40] * 2000))
            written += 2000

    async with (
        ScriptedWorker(generate).serving() as url,
        door(tiny_model, url) as client,
        client.stream("POST", CHAT, json={"model": "tiny", "messages": HELLO, "stream": True}) as answer,
    ):
        await anext(answer.aiter_raw())
        before = -1
        async with asyncio.timeout(30):
            while before != written:  # until nothing moves
                before = written
                await asyncio.sleep(0.5)
        assert written < 30_000_000


def test_writing_to_a_client_that_has_left_is_its_end() -> None:
    """uvloop raises a plain `RuntimeError` there, which would be an error of the front door."""

    async def write() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        theirs.close()
        writer.transport.abort()
        await asyncio.sleep(0.01)
        engines = Engines(Mock(), Mock(), None, 0)
        await answer(engines, Request("GET", "/live", {}, b""), writer)

    with pytest.raises(ConnectionError):
        uvloop.run(write())
