"""The endpoints of the Responses API, asked by OpenAI's client, before a scripted frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from responses_frontend import (
    CALLING,
    HELLO,
    TOOL,
    WAIT_S,
    Answers,
    Slow,
    bodies,
    client_of,
    refused,
    served,
)
from responses_oracle import check_stream, checked_response
from test_frontdoor_exchange import STREAM_HEAD, event, refuse, says
from test_frontdoor_server import chunked, error_of, get, house, post
from test_responses_events import USAGE, chunk, logprob, usage

from worker.frontdoor.responses.service import responses_of


async def test_a_response() -> None:
    async with served(Answers(HELLO)) as (at, client):
        response = await client.responses.create(
            model="m", input="Hi", instructions="Be kind.", max_output_tokens=9, extra_body={"top_k": 3}
        )
    assert (response.output_text, response.status) == ("Hello", "completed")
    assert response.usage is not None
    assert response.usage.total_tokens == USAGE["total_tokens"]
    checked_response(response.to_dict())
    assert bodies(at) == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            "max_completion_tokens": 9,
            "top_k": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_a_stream_is_the_response() -> None:
    async with served(Answers(HELLO)) as (_, client):
        async with client.responses.stream(model="m", input="Hi") as stream:
            texts = [each.delta async for each in stream if each.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="m", input="Hi")
        raw = [each.to_dict() async for each in await client.responses.create(model="m", input="Hi", stream=True)]
    assert texts == ["Hel", "lo"]
    assert final.output_text == whole.output_text == check_stream(raw).output_text == "Hello"


class Person(BaseModel):
    name: str


async def test_an_answer_is_parsed() -> None:
    async with served(Answers([chunk("stop", content='{"name":"Ada"}'), usage()])) as (at, client):
        response = await client.responses.parse(model="m", input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ada")
    assert bodies(at)[0]["response_format"]["json_schema"]["name"] == "Person"


async def test_log_probabilities_and_receipts() -> None:
    receipt = {"nvext": {"engine_data": {"logits_processors": {"receipt": True}}}}
    said = [{**chunk("stop", content="a", logprobs={"content": [logprob("a", "b")]}), **receipt}, usage()]
    async with served(Answers(said)) as (at, client):
        response: Any = await client.responses.create(
            model="m",
            input="Hi",
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            extra_body={
                "logits_processors": {"processors": [{"name": "min_tokens", "args": {"n": 1}}], "receipt": True}
            },
        )
    assert [each.token for each in response.output[0].content[0].logprobs[0].top_logprobs] == ["a", "b"]
    assert response.nvext == receipt["nvext"]
    assert bodies(at)[0]["nvext"]["extra_fields"] == ["engine_data"]


async def test_a_call_and_its_result() -> None:
    async with served(Answers(CALLING, HELLO), tool_call_format="hermes") as (at, client):
        first = await client.responses.create(model="m", input="Hi", tools=[TOOL])
        (made,) = first.output
        assert made.type == "function_call"
        assert json.loads(made.arguments) == {"city": "Oslo"}
        second = await client.responses.create(
            model="m",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": made.call_id, "output": "rain"}],
            tools=[TOOL],
        )
    assert second.output_text == "Hello"
    assert second.previous_response_id == first.id
    asked = bodies(at)[1]["messages"]
    assert [each["role"] for each in asked] == ["user", "assistant", "tool"]
    assert asked[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city":"Oslo"}'}


async def test_a_conversation_without_a_store() -> None:
    """The output goes back as input, as clients that store nothing do it."""
    thinking = [chunk(reasoning_content="Hm."), *HELLO]
    async with served(Answers(thinking, HELLO)) as (at, client):
        first = await client.responses.create(model="m", input="Hi", store=False)
        again: Any = [{"role": "user", "content": "Hi"}, *(each.to_dict() for each in first.output)]
        await client.responses.create(model="m", input=[*again, {"role": "user", "content": "Go on"}], store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
    assert bodies(at)[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Hello"},
        {"role": "user", "content": "Go on"},
    ]


async def test_tokens_of_reasoning_are_counted_where_models_think() -> None:
    """The frontend says with each chunk how many tokens there are so far."""
    so_far = [
        {**each, "usage": {**USAGE, "completion_tokens": n, "completion_tokens_details": None}}
        for n, each in enumerate([chunk(reasoning_content="H"), chunk(reasoning_content="m."), *HELLO], 1)
    ]
    async with served(Answers(so_far), dyn_reasoning_parser="qwen3") as (at, client):
        response = await client.responses.create(model="m", input="Hi")
    assert bodies(at)[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.output_tokens == 5


async def test_stored_responses_are_fetched_and_deleted() -> None:
    async with served(Answers(HELLO)) as (at, client):
        made = await client.responses.create(model="m", input="Hi", metadata={"a": "b"})
        assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
        await client.responses.delete(made.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="restarted") as caught:
                await ask(made.id)
            assert refused(caught.value) == (404, "response_id")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="m", input="Hi", previous_response_id=made.id)
        assert refused(caught.value) == (404, "previous_response_id")
        assert responses_of(at.door).store.num_bytes == 0


async def test_input_items_are_those_of_the_whole_conversation() -> None:
    async with served(Answers(HELLO)) as (_, client):
        first = await client.responses.create(model="m", input=[{"role": "user", "content": "a"}])
        second = await client.responses.create(model="m", input="b", previous_response_id=first.id)
        found: Any = [each async for each in await client.responses.input_items.list(second.id, order="asc", limit=1)]
        newest = await client.responses.input_items.list(second.id, limit=2)
        first_page = await client.responses.input_items.list(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.input_items.list(second.id, after="msg_0")
        assert refused(caught.value) == (400, "after")
    assert [(each.role, each.content[0].text) for each in found] == [
        ("user", "a"),
        ("assistant", "Hello"),
        ("user", "b"),
    ]
    assert [each.id for each in newest.data] == [found[2].id, found[1].id]
    assert (newest.has_more, first_page.has_more) == (True, False)


async def test_items_are_referred_to_by_their_ids() -> None:
    async with served(Answers(HELLO)) as (at, client):
        first = await client.responses.create(model="m", input="Hi")
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        await client.responses.create(model="m", input=[reference, {"role": "user", "content": "b"}])
    assert bodies(at)[1]["messages"][0] == {"role": "assistant", "content": "Hello"}


async def test_references_are_so_large_together() -> None:
    """A few bytes stand for as many as a body has, and would as often as they are there."""
    async with served(Answers(HELLO), body_limit_mib=1) as (_, client):
        large: Any = {"role": "user", "content": "x" * 600_000, "id": "msg_large"}
        await client.responses.create(model="m", input=[large])
        reference: Any = {"type": "item_reference", "id": "msg_large"}
        await client.responses.create(model="m", input=[reference])
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(model="m", input=[reference, reference])
    assert refused(caught.value) == (413, "input")


async def test_large_items_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all other clients would wait for each of two small requests."""
    num_aside = 0
    async with served(Answers(HELLO)) as (at, client):
        made = await client.responses.create(model="m", input="x" * 100_000, instructions="y" * 100_000)
        aside = at.door.rewriting.aside

        async def counted(label: bytes, read: Callable[[], Any]) -> Any:
            nonlocal num_aside
            num_aside += 1
            return await aside(label, read)

        monkeypatch.setattr(at.door.rewriting, "aside", counted)
        items: Any = (await client.responses.input_items.list(made.id)).data
        again = await client.responses.retrieve(made.id)
    assert num_aside == 2
    assert items[0].content[0].text == "x" * 100_000
    assert (again.instructions, again.output_text) == ("y" * 100_000, "Hello")


async def test_several_things_are_included() -> None:
    async with served(Answers(HELLO)) as (_, client):
        response = await client.responses.create(model="m", input="Hi")
        await client.responses.retrieve(
            response.id, include=["message.output_text.logprobs", "reasoning.encrypted_content"]
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(
                response.id, include=["message.output_text.logprobs", "file_search_call.results"]
            )
        assert refused(caught.value) == (400, "include")


async def test_one_client_cannot_see_another_s_responses() -> None:
    async with served(Answers(HELLO), keys=["k1", "k2"], key="k1") as (at, client), client_of(at, "k2") as other:
        made = await client.responses.create(model="m", input="Hi")
        assert (await client.responses.retrieve(made.id)).id == made.id
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="m", input="Hi", previous_response_id=made.id)


async def test_without_a_store() -> None:
    async with served(Answers(HELLO), response_store_mib=0) as (_, client):
        made: Any = await client.responses.create(model="m", input="Hi")
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": made.id}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="Hi", **fields)
            assert refused(caught.value) == (400, next(iter(fields)))


async def test_a_response_larger_than_the_store_says_so() -> None:
    async with served(Answers([chunk("stop", content="x" * 2**20), usage()]), response_store_mib=1) as (_, client):
        events: list[Any] = [each async for each in await client.responses.create(model="m", input="Hi", stream=True)]
        whole: Any = await client.responses.create(model="m", input="Hi")
        for response in (events[-1].response, whole):
            assert response.store is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)


async def test_tokens_are_those_of_the_prompt() -> None:
    """The frontend is asked for them, and generates nothing."""

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(b'event: token_ids\n: "[1,2,3]"\n\n') + event(HELLO[0]))
        assert await reader.read() == b""

    async with served(tell, tool_call_format="hermes") as (at, client):
        counted = await client.responses.input_tokens.count(model="m", input="Hi", instructions="A", tools=[TOOL])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.input_tokens.count(model="m", input="Hi", personality="friendly")
        assert refused(caught.value) == (400, "personality")
    assert (counted.input_tokens, counted.object) == (3, "response.input_tokens")
    (asked,) = bodies(at)
    assert [each["role"] for each in asked["messages"]] == ["system", "user"]
    assert asked["tools"][0]["function"]["name"] == "f"


async def test_a_long_conversation_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    long: Any = [{"role": "user", "content": "x" * 100} for _ in range(400)]
    async with served(Answers(HELLO)) as (at, client):
        aside: list[Any] = []
        monkeypatch.setattr(at.door.rewriting, "aside", spied(at.door.rewriting.aside, aside))
        first = await client.responses.create(model="m", input=long)
        num_aside = len(aside)
        await client.responses.create(model="m", input="Go on", previous_response_id=first.id)
        long.append({"role": "robot", "content": "a"})
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input=long)
        assert refused(caught.value) == (400, "input[400].role")
    assert num_aside == 3  # the body, its items, and the chat
    assert len(aside) == 7  # items and chat of the second, body and items of the third
    assert [len(each["messages"]) for each in bodies(at)] == [400, 402]


def spied(called: Any, calls: list[Any]) -> Any:
    """``called``, with a list of what it is called with."""

    async def spy(*arguments: Any) -> Any:
        calls.append(arguments)
        return await called(*arguments)

    return spy


# Errors.


async def test_an_error_of_the_frontend_names_the_client_s_field() -> None:
    async with served(refuse) as (_, client):
        for fields in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError, match="input: too long") as caught:
                await client.responses.create(model="m", input="Hi", **fields)  # type: ignore[call-overload]
            assert refused(caught.value) == (400, "input")


async def test_an_answer_that_breaks_off_has_failed() -> None:
    async with served(says(HELLO[0], end=b"")) as (_, client):
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="m", input="Hi")
        events = [each.to_dict() async for each in await client.responses.create(model="m", input="Hi", stream=True)]
        final = check_stream(events)
        assert (final.status, final.output_text) == ("failed", "Hel")
        assert (await client.responses.retrieve(final.id)).status == "failed"


async def test_a_client_that_leaves_ends_its_response() -> None:
    slow = Slow(*HELLO)
    slow.may.release()
    async with served(slow) as (at, client):
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        await anext(stream)
        await stream.close()
        await asyncio.wait_for(slow.left.wait(), WAIT_S)
        assert len(responses_of(at.door).store) == 0


REFUSED: list[tuple[bytes, int, str | None]] = [
    (post(b'{"model": "m"}', path="/v1/responses"), 400, "input"),
    (post(b'{"input": "a"}', path="/v1/responses"), 400, "model"),
    (post(b'{"model": "m", "input": "a", "input": "b"}', path="/v1/responses"), 400, "input"),
    (post(b'{"input": "a"}', path="/v1/responses/input_tokens"), 400, "model"),
    (post(b'{"model": "m"}', path="/v1/responses/input_tokens"), 400, "input"),
    (post(b'{"model": "m", "input": "a", "stream": true}', path="/v1/responses/input_tokens"), 400, "stream"),
    (get("/v1/responses"), 405, None),
    (get("/v1/responses/resp_1?limit=3"), 400, "limit"),
    (get("/v1/responses/resp_1?include=web_search_call.results"), 400, "include"),
    (get("/v1/responses/resp_1?include[]=message.output_text.logprobs"), 404, "response_id"),
    (get("/v1/responses/resp_1?stream=1"), 400, "stream"),
    (get("/v1/responses/resp_1?starting_after=1"), 400, "starting_after"),
    (get("/v1/responses/resp_1?stream=true&starting_after=x"), 400, "starting_after"),
    (get("/v1/responses/resp_1?stream=true"), 404, "response_id"),
    (get("/v1/responses/resp_1?include_obfuscation=true"), 400, "include_obfuscation"),
    (get("/v1/responses/resp_1/input_items?limit=0"), 400, "limit"),
    (get("/v1/responses/resp_1/input_items?limit=101"), 400, "limit"),
    (get("/v1/responses/resp_1/input_items?order=up"), 400, "order"),
    (get("/v1/responses/resp_1/input_items"), 404, "response_id"),
    (get("/v1/responses/resp_1?a=b", method="DELETE"), 400, "a"),
    (post(b'{"reason": "late"}', path="/v1/responses/resp_1/cancel"), 400, "reason"),
    (post(b"{}", path="/v1/responses/resp_1/cancel"), 404, "response_id"),
]


@pytest.mark.parametrize(("request_bytes", "status", "param"), REFUSED)
async def test_what_is_refused(request_bytes: bytes, status: int, param: str | None) -> None:
    async with house(Answers(HELLO)) as at:
        found, error = error_of(await at.ask(request_bytes))
        assert at.frontends[0].requests == []
    assert (found, error["param"]) == (status, param)


async def test_what_cannot_be_cancelled_or_streamed_again() -> None:
    async with served(Answers(HELLO)) as (_, client):
        made = await client.responses.create(model="m", input="Hi")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.cancel(made.id)
        assert refused(caught.value) == (400, "response_id")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(made.id, stream=True)
        assert refused(caught.value) == (400, "stream")
