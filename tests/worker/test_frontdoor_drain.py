"""The end of a front door: answers that do not finish in time end with the error of their API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from test_frontdoor_exchange import FIELDS, STREAM_HEAD, WAIT_S, chunk_of, event
from test_frontdoor_server import error_of, house, post
from test_messages_server import events_in

from worker.frontdoor.encoding import encoded

TOOLS = {**FIELDS, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
MESSAGE = {**FIELDS, "max_tokens": 5}
RESPONSE = {"model": "m", "input": "Hi"}
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", RESPONSE),
    "background": ("/v1/responses", {**RESPONSE, "background": True}),
    "messages": ("/v1/messages", MESSAGE),
    "chat": ("/v1/chat/completions", TOOLS),
    "completions": ("/v1/completions", {"model": "m", "prompt": "a", "logprobs": 1}),
}
HERMES = {"tool_call_format": "hermes"}


class Endless:
    """A frontend that begins a stream, and never ends it."""

    def __init__(self, *chunks: Any) -> None:
        self._chunks = chunks

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(event, self._chunks)))
        await reader.read()


async def answer_at_the_end(name: str, *chunks: Any, **fields: Any) -> bytes:
    """The answer to a request that is under way when the front door's time is over."""
    path, body = PATHS[name]
    async with house(Endless(*chunks), **HERMES) as at:
        reader, writer = await at.connect()
        writer.write(post(encoded({**body, **fields}), path=path, close=False))
        answer = b""
        while chunks and b"Hel" not in answer:
            answer += await asyncio.wait_for(reader.read(65536), WAIT_S)
        while not at.frontends[0].requests:
            await asyncio.sleep(0.001)
        await at.door.drain(0.01)
        answer += await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        return answer


@pytest.mark.parametrize("name", ["responses", "background", "messages", "chat"])
async def test_a_stream_beyond_its_time_ends_with_an_error(name: str) -> None:
    answer = await answer_at_the_end(name, chunk_of("Hel"), stream=True)
    assert answer.endswith(b"0\r\n\r\n")
    if name == "chat":
        assert json.loads(answer.split(b"data: ")[-1].split(b"\n")[0])["error"]["message"] == "the server shuts down"
        return
    kind, last = events_in(answer)[-1]
    error = last["error"] if name == "messages" else last["response"]["error"]
    assert (kind, error["message"]) == (
        "error" if name == "messages" else "response.failed",
        "the server shuts down",
    )


@pytest.mark.parametrize("name", ["responses", "messages", "chat", "completions"])
async def test_an_answer_beyond_its_time_is_a_503(name: str) -> None:
    answer = await answer_at_the_end(name)
    status, error = error_of(answer)
    assert (status, error["message"]) == (503, "the server shuts down")
