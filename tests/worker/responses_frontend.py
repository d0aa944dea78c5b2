"""A front door before a scripted frontend, and OpenAI's client before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import openai
from test_frontdoor_exchange import STREAM_HEAD, event, says
from test_frontdoor_server import House, Script, house
from test_responses_events import call, chunk, usage

from worker.requests.refusals import ONLY_CHECKED

WAIT_S = 100.0
HELLO = [chunk(content="Hel"), chunk("stop", content="lo"), usage()]
CALLING = [call(0, id="c1", name="f"), call(0, '{"city"'), call(0, ':"Oslo"}'), chunk("tool_calls"), usage()]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}


class Answers:
    """A script that gives one answer after the other, the last one for ever."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self._answers = list(answers)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chunks = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await says(*chunks)(reader, writer)


class Slow:
    """A script that says a chunk at a time, when it may."""

    def __init__(self, *chunks: Any) -> None:
        self._chunks = chunks
        self.may = asyncio.Semaphore(0)
        self.left = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.create_task(reader.read())
        writer.write(STREAM_HEAD)
        for each in self._chunks:
            waiting = asyncio.create_task(self.may.acquire())
            await asyncio.wait([gone, waiting], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                waiting.cancel()
                self.left.set()
                return
            writer.write(event(each))
        writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def served(
    *scripts: Script, key: str = "none", **options: Any
) -> AsyncIterator[tuple[House, openai.AsyncOpenAI]]:
    checked = [_after_checks(script, lambda: at) for script in scripts]
    async with house(*checked, **options) as at, client_of(at, key) as client:
        yield at, client


def _after_checks(script: Script, at: Callable[[], House]) -> Script:
    """A script before which each check is answered, as by a worker that refuses nothing."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_check = any(_is_check(frontend.requests[-1]) for frontend in at().frontends if frontend.requests)
        await (says(chunk("stop")) if is_check else script)(reader, writer)

    return say


def _is_check(request: bytes) -> bool:
    return ONLY_CHECKED.encode() in request


def client_of(at: House, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{at.port}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


def bodies(at: House) -> list[Any]:
    """What the frontend has been asked."""
    return [json.loads(each.partition(b"\r\n\r\n")[2]) for each in at.frontends[0].requests if not _is_check(each)]


def refused(error: openai.APIStatusError) -> tuple[int, str | None]:
    return error.status_code, error.body["param"]  # type: ignore[index]
