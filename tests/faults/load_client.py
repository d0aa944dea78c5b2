"""A client that keeps a record of every request: what came, when, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from e2e_stack import MODEL

VOCABULARY = range(300, 900)
PREFIX = "token_id:"


def prompt_of(number: int, length: int = 40) -> list[int]:
    """A prompt like no other. It ends with a whole character: the detokenizer of ai-dynamo 1.4.2
    panics at answers to some that do not.
    """
    return [*random.Random(number).choices(VOCABULARY, k=length - 1), VOCABULARY[0]]


@dataclass
class Record:
    """One request.

    Attributes:
        number: Which one, in order of sending.
        prompt: Its token ids.
        num_tokens: What it asked for.
        sent_s: When it was sent, by `time.monotonic`, as all times.
        status: HTTP status; None while nothing has come.
        token_ids: What came.
        times_s: When each of them came.
        text: What came as text.
        finish_reasons: All of them: there must be one.
        errors: Errors that came as events or bodies, or broke the connection.
        usage: As the server said.
        ended_s: When the last byte came.
        has_left: Whether the client went away on purpose.
    """

    number: int
    prompt: Sequence[int]
    num_tokens: int
    sent_s: float
    status: int | None = None
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    ended_s: float | None = None
    has_left: bool = False

    @property
    def longest_gap_s(self) -> float:
        """Longest time without a token, from the first token to the end."""
        times = [*self.times_s, *([self.ended_s] if self.ended_s else [])]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def take(self, event: dict[str, Any]) -> None:
        """An event of the stream."""
        if "error" in event:
            self.errors.append(json.dumps(event["error"]))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            found = (choice.get("logprobs") or {}).get("tokens") or ()
            self.token_ids += [int(token.removeprefix(PREFIX)) for token in found]
            self.times_s += [time.monotonic()] * len(found)
            self.text += choice.get("text") or ""
            if choice.get("finish_reason"):
                self.finish_reasons.append(choice["finish_reason"])


class LoadClient:
    """Sends requests to a stack, and keeps their records.

    Args:
        url: Of the frontend or the front door.
        timeout_s: Longest silence of the server; a request that meets it has an error of its own.
    """

    def __init__(self, url: str, timeout_s: float = 60) -> None:
        self.url = url
        self.records: list[Record] = []
        self._http = httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def ask(
        self, prompt: Sequence[int], num_tokens: int, leave_after_s: float | None = None, **body: Any
    ) -> Record:
        """One greedy answer of `num_tokens` tokens, streamed; the client may go away early."""
        record = Record(len(self.records), prompt, num_tokens, time.monotonic())
        self.records.append(record)
        asked = self._read(record, {**body_of(prompt, num_tokens), **body})
        try:
            await asyncio.wait_for(asked, leave_after_s)
        except TimeoutError:
            record.has_left = True
        return record

    async def _read(self, record: Record, body: dict[str, Any]) -> None:
        try:
            async with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                record.status = answer.status_code
                if answer.status_code != 200:
                    record.errors.append((await answer.aread()).decode(errors="replace"))
                else:
                    is_whole = False
                    async for line in answer.aiter_lines():
                        if line == "data: [DONE]":
                            is_whole = True
                        elif line.startswith("data: "):
                            record.take(json.loads(line[len("data: ") :]))
                    if not is_whole and not record.errors:
                        record.errors.append("the stream ended without [DONE]")
        except httpx.HTTPError as error:
            record.errors.append(f"{type(error).__name__}: {error}")
        record.ended_s = time.monotonic()


def body_of(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """A greedy completion whose events tell the ids of their tokens."""
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@contextlib.asynccontextmanager
async def under_load(client: LoadClient, num_clients: int, num_tokens: int, first: int = 0) -> AsyncIterator[None]:
    """So many clients ask one question after the other until the block ends; then they finish."""
    over = asyncio.Event()

    async def one(name: int) -> None:
        turn = 0
        while not over.is_set():
            await client.ask(prompt_of(first + name + num_clients * turn), num_tokens)
            turn += 1

    clients = [asyncio.create_task(one(name)) for name in range(num_clients)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*clients)


async def streams(client: LoadClient, number: int, num_tokens: int, first: int = 0) -> list[asyncio.Task[Record]]:
    """So many answers at a time, all of which have begun."""
    asked = [asyncio.create_task(client.ask(prompt_of(first + name), num_tokens)) for name in range(number)]
    while len(client.records) < number:
        await asyncio.sleep(0)
    await all_begun(client, 5)
    return asked


async def all_begun(client: LoadClient, num_tokens: int) -> None:
    """Until every request has got so many tokens."""

    async def wait() -> None:
        while any(len(record.token_ids) < num_tokens for record in client.records):
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 60)
