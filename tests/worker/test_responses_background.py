"""Background responses, asked for by OpenAI's client, before a scripted frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from responses_frontend import HELLO, WAIT_S, Answers, Slow, client_of, refused, served
from responses_oracle import check_stream, checked_response
from test_frontdoor_exchange import refuse
from test_frontdoor_server import error_of, house, post
from test_responses_events import chunk, usage

from worker.frontdoor import bodies
from worker.frontdoor.encoding import encoded
from worker.frontdoor.responses import generation, service
from worker.frontdoor.responses.service import responses_of


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """A background response once it has ended."""
    while True:
        response = await client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)


async def test_a_background_response_is_fetched() -> None:
    slow = Slow(*HELLO)
    async with served(slow) as (_, client):
        made = await client.responses.create(model="m", input="Hi", background=True)
        assert (made.status, made.output) == ("queued", [])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="Hi", previous_response_id=made.id)
        assert refused(caught.value) == (400, "previous_response_id")
        slow.may.release()
        while (now := await client.responses.retrieve(made.id)).status == "queued":
            await asyncio.sleep(0.01)
        assert (now.status, now.output_text) == ("in_progress", "Hel")
        checked_response(now.to_dict())
        assert len((await client.responses.input_items.list(made.id)).data) == 1
        for _ in range(2):
            slow.may.release()
        final = await ended(client, made.id)
        assert (final.status, final.output_text) == ("completed", "Hello")
        assert (await client.responses.cancel(made.id)).status == "completed"


async def test_a_background_response_is_cancelled() -> None:
    slow = Slow(*HELLO)
    slow.may.release()
    async with served(slow) as (at, client):
        stream = await client.responses.create(model="m", input="Hi", background=True, stream=True)
        events = [await anext(stream) for _ in range(6)]
        response_id = events[0].response.id  # type: ignore[union-attr]
        assert (await client.responses.cancel(response_id)).status == "cancelled"
        rest = [each async for each in stream]
        assert rest[-1].type == "error"
        await asyncio.wait_for(slow.left.wait(), WAIT_S)
        found = await client.responses.retrieve(response_id)
        assert (found.status, found.output_text) == ("cancelled", "Hel")
        plain = await client.responses.create(model="m", input="Hi", background=True)
        await client.responses.delete(plain.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(plain.id)
        assert responses_of(at.door)._running == {}


async def test_a_response_may_be_cancelled_before_it_begins() -> None:
    async with served(Slow(*HELLO)) as (at, client):
        service_, make = responses_of(at.door), responses_of(at.door).run

        def cancelled(*given: Any, **named: Any) -> Any:
            run = make(*given, **named)
            run._task.cancel()
            return run

        service_.run = cancelled  # type: ignore[method-assign]
        stream = await client.responses.create(model="m", input="Hi", background=True, stream=True)
        events = [each async for each in stream]
        assert events[-1].type == "error"
        found = await client.responses.retrieve(events[0].response.id)  # type: ignore[union-attr]
        assert found.status == "cancelled"
        assert service_._running == {}


async def test_a_large_background_response_keeps_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "HELD_AT_ONCE", 1)
    slow = Slow(*HELLO)
    large: Any = {"model": "m", "input": "Hi", "background": True, "user": "x" * 700_000}
    async with served(slow, body_limit_mib=1) as (at, client):
        made = await client.responses.create(**large)
        with pytest.raises(openai.InternalServerError, match="too many bodies") as caught:
            await client.responses.create(**large)
        assert caught.value.status_code == 503
        assert (await client.responses.create(model="m", input="Hi", background=True)).status == "queued"
        await client.responses.cancel(made.id)
        assert at.door.bodies.num_bytes == 0
        made = await client.responses.create(**large)
        await client.responses.delete(made.id)


async def test_a_background_response_is_streamed_again() -> None:
    slow = Slow(*HELLO)
    async with served(slow) as (_, client):
        stream = await client.responses.create(model="m", input="Hi", background=True, stream=True)
        first: Any = await anext(stream)
        await stream.close()  # the response goes on
        again = await client.responses.retrieve(first.response.id, stream=True)
        for _ in range(3):
            slow.may.release()
        events = [each.to_dict() async for each in again]
        final = await ended(client, first.response.id)
        later = await client.responses.retrieve(first.response.id, stream=True, starting_after=4)
        assert [each.to_dict() async for each in later] == events[5:]
    assert check_stream(events).to_dict() == final.to_dict()


async def test_events_that_nobody_can_ask_for_are_not_kept() -> None:
    slow = Slow(*(chunk(content="a") for _ in range(101)))
    async with served(slow) as (at, client):
        for is_streamed in (False, True):
            made: Any = await client.responses.create(model="m", input="Hi", background=True, stream=is_streamed)
            response_id = (await anext(made)).response.id if is_streamed else made.id
            for _ in range(100):
                slow.may.release()
            while (await client.responses.retrieve(response_id)).output_text != "a" * 100:
                await asyncio.sleep(0.01)
            ((_, run),) = responses_of(at.door)._running.items()
            assert (len(run.events) > 100) is is_streamed
            await client.responses.delete(response_id)


async def test_a_background_response_without_room_says_so() -> None:
    big = [chunk("stop", content="x" * 2**20), usage()]
    async with served(Answers(big), response_store_mib=1) as (_, client):
        stream = await client.responses.create(model="m", input="Hi", background=True, stream=True)
        events: list[Any] = [each async for each in stream]
        assert (events[0].response.store, events[-1].response.store) == (True, False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(events[0].response.id)


async def test_a_background_response_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(refuse) as (_, client):
        made = await client.responses.create(model="m", input="Hi", background=True)
        final = await ended(client, made.id)
        assert (final.status, final.error.code, final.error.param) == ("failed", "invalid_prompt", "input")
        with pytest.raises(openai.BadRequestError) as caught:  # what the front door refuses is the answer
            await client.responses.create(model="m", input="Hi", background=True, extra_body={"logit_bias": 3})
        assert refused(caught.value) == (400, "logit_bias")
        monkeypatch.setattr(service, "MAX_RUNNING", 0)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="m", input="Hi", background=True)


async def test_a_background_response_that_a_defect_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def defective(*_: Any) -> AsyncGenerator[Any, None]:
        raise RuntimeError("a defect")
        yield

    monkeypatch.setattr(generation, "chat", defective)
    async with served(Answers(HELLO)) as (_, client):
        final = await ended(client, (await client.responses.create(model="m", input="Hi", background=True)).id)
    assert (final.status, final.error.code) == ("failed", "server_error")


async def test_background_responses_of_one_client_keep_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_RUNNING", 2)
    async with served(Slow(*HELLO), key="large", keys=("large", "small", "third", "fourth")) as (at, large):

        async def status(client: openai.AsyncOpenAI) -> str | None:
            try:
                return (await client.responses.create(model="m", input="Hi", background=True)).status
            except openai.RateLimitError:
                return None

        assert [await status(large) for _ in range(3)] == ["queued", "queued", None]
        found = []
        for key in ("small", "small", "third", "fourth"):
            async with client_of(at, key) as client:
                found.append(await status(client))
        assert found == ["queued", None, "queued", None]


async def test_a_background_response_may_be_nested_too_deep() -> None:
    """Near the limit of recursion the body is read, and the chat that it becomes is deeper."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "x": "@"}}]
    fields = {"model": "m", "input": "Hi", "background": True, "tools": tools}
    found = set()
    async with house(Slow(*HELLO), tool_call_format="hermes") as at:
        for depth in range(900, 1000):
            body = encoded(fields).replace(b'"@"', b"[" * depth + b"]" * depth)
            status, error = error_of(await at.ask(post(body, path="/v1/responses")))
            found.add((status, "nested" in error["message"]))
        assert at.frontends[0].requests == []
    assert found == {(400, True)}
