"""Completions that a handler answers: several prompts, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from test_frontdoor_exchange import STREAM_HEAD, USAGE, WAIT_S, event, refuse, says
from test_frontdoor_server import Script, error_of, house, post

from worker.frontdoor.encoding import TURN, encoded

PATH = "/v1/completions"
FIELDS: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 2, "logprobs": 1}


def asked(**fields: Any) -> bytes:
    return post(encoded({**FIELDS, **fields}), "X-Request-Id: mine", "X-Dynamo-Request-Id: own", path=PATH)


def text_chunk(text: str, **more: Any) -> dict[str, Any]:
    logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [{text: -1.0, "x": -2.0}]}
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
    return {"id": "cmpl-1", "created": 1, "model": "m", "object": "text_completion", "choices": [choice], **more}


USAGE_CHUNK = {**text_chunk(""), "choices": [], "usage": USAGE}
CHUNKS = [text_chunk("a"), text_chunk("b"), USAGE_CHUNK]


def whole(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def events(answer: bytes) -> list[Any]:
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


async def test_each_choice_of_each_prompt_is_a_request_of_its_own() -> None:
    async with house(says(*CHUNKS)) as at:
        answer = whole(await at.ask(asked(prompt=["Hello", "you"], n=2)))
        requests = at.frontends[0].requests
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 4
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"a": -1.0, "x": -2.0}, {"b": -1.0, "x": -2.0}],
        "text_offset": [0, 1],
    }
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    prompts = sorted(json.loads(request.partition(b"\r\n\r\n")[2])["prompt"] for request in requests)
    assert prompts == ["Hello", "Hello", "you", "you"]
    assert all(b"x-request-id: mine\r\n" in request for request in requests)
    with_own = [request for request in requests if b"x-dynamo-request-id: own\r\n" in request]
    assert len(with_own) == 1


async def test_a_refusal_is_the_answer() -> None:
    async with house(refuse) as at:
        for stream in (False, True):
            status, error = error_of(await at.ask(asked(prompt=["a", "b"], stream=stream)))
            assert (status, error["message"]) == (400, "messages: too long")


async def test_an_error_in_the_middle_is_the_last_event() -> None:
    lost = {"error": {"message": "the engine broke", "type": "server_error", "code": 500}}
    async with house(says(CHUNKS[0], lost)) as at:
        found = events(await at.ask(asked(stream=True)))
        status, error = error_of(await at.ask(asked()))
    assert [one.get("error", {}).get("message") for one in found] == [None, "the engine broke"]
    assert (status, error["message"]) == (500, "the engine broke")


async def test_usage_comes_to_those_who_ask() -> None:
    async with house(says(*CHUNKS)) as at:
        plain = events(await at.ask(asked(stream=True)))
        with_usage = events(await at.ask(asked(stream=True, stream_options={"include_usage": True})))
    assert [len(plain), plain[-1]] == [3, b"[DONE]"]
    assert with_usage[:2] == plain[:2]
    assert with_usage[2]["usage"] == USAGE
    assert with_usage[2]["choices"] == []
    assert with_usage[2]["id"] == "cmpl-1"


async def test_large_first_chunks_have_the_id_of_one() -> None:
    """Each prompt's had its own: others come while the first one is encoded."""
    numbers, barrier = itertools.count(), asyncio.Barrier(4)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        await barrier.wait()
        chunks = [text_chunk("a" * 2 * TURN, id=f"cmpl-{number}"), text_chunk("b", id=f"cmpl-{number}"), USAGE_CHUNK]
        await says(*chunks)(reader, writer)

    async with house(say) as at:
        *found, _ = events(await at.ask(asked(prompt=["a"] * 4, stream=True)))
    assert len(found) == 8
    assert {one["id"] for one in found} == {found[0]["id"]}


async def test_a_client_that_leaves_ends_all_requests() -> None:
    gone: list[bytes] = []

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + event(CHUNKS[0]))
        gone.append(await reader.read())

    async with house(say) as at:
        reader, writer = await at.connect()
        writer.write(asked(prompt=["a", "b", "c"], stream=True))
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
        writer.close()
        async with asyncio.timeout(WAIT_S):
            while len(gone) < 3:
                await asyncio.sleep(0.01)
    assert gone == [b""] * 3


async def test_other_completions_stay_byte_for_byte() -> None:
    body = b'{ "model":"m", "prompt" : "Hello", "echo": null, "logprobs":null}'
    async with house(says(*CHUNKS)) as at:
        await at.ask(post(body.replace(b', "echo": null, "logprobs":null', b""), path=PATH))
        await at.ask(post(body, path=PATH))
        first, second = at.frontends[0].requests
    assert first.endswith(b'{ "model":"m", "prompt" : "Hello"}')
    assert json.loads(second.partition(b"\r\n\r\n")[2]) == {"model": "m", "prompt": "Hello"}


@pytest.mark.parametrize("size", [10, 40_000])
async def test_a_large_body_has_the_same_answer(size: int) -> None:
    async with house(says(*CHUNKS)) as at:
        answer = whole(await at.ask(asked(prompt="a" * size, echo=True, logprobs=None)))
    assert answer["choices"][0]["text"] == "a" * size + "ab"
    assert answer["choices"][0]["logprobs"] is None


def script_of(*chunks: Any) -> Script:
    return says(*chunks, USAGE_CHUNK)


async def test_prompt_logprobs_of_a_chat() -> None:
    data = {
        "prompt_logprobs": [None, {"5": {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}],
        "prompt_tokens": [{"token_id": 4, "decoded_token": "a"}, {"token_id": 5, "decoded_token": "b"}],
    }
    chunk = {**text_chunk(""), "choices": [{"index": 0, "delta": {"content": "c"}, "finish_reason": "stop"}]}
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0}
    async with house(script_of({**chunk, "nvext": {"engine_data": data}})) as at:
        answer = whole(await at.ask(post(encoded(chat))))
        (request,) = at.frontends[0].requests
        first, *_ = events(await at.ask(post(encoded({**chat, "stream": True}))))
    assert answer["prompt_logprobs"] == first["prompt_logprobs"] == data["prompt_logprobs"]
    assert answer["choices"][0]["message"]["content"] == "c"
    assert "nvext" not in answer
    sent = json.loads(request.partition(b"\r\n\r\n")[2])
    assert (sent["prompt_logprobs"], sent["nvext"]) == (0, {"extra_fields": ["engine_data"]})
    async with house(script_of(chunk)) as at:
        status, error = error_of(await at.ask(post(encoded(chat))))
    assert (status, error["message"]) == (502, "the worker sent no log probabilities of the prompt")
