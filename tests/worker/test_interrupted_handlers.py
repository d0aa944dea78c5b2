"""Handlers of the front door whose clients leave wherever they wait: no body, turn, connection or
task is left, and the next client gets its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from pathlib import Path
from typing import Any

import pytest
from batch_services import form, jsonl, line
from interruptions import Interruption, interrupting_tasks, interruptions, nothing_left
from test_completion_handler import CHUNKS as TEXT_CHUNKS
from test_frontdoor_exchange import CHUNKS, says
from test_frontdoor_server import House, get, house, post

from worker.frontdoor.encoding import encoded
from worker.frontdoor.process import make_batches
from worker.frontdoor.server import REASONS_AT_ONCE

HELLO = [{"role": "user", "content": "a"}]
LONG = "a" * 70_000
MODELS = b'{"data": [{"id": "m"}]}'


def request(path: str, **fields: Any) -> bytes:
    return post(encoded({"model": "m", **fields}), path=path)


REQUESTS: dict[str, bytes] = {
    "message": request("/v1/messages", max_tokens=5, messages=HELLO),
    "message, streamed": request("/v1/messages", max_tokens=5, messages=HELLO, stream=True),
    "message, long": request("/v1/messages", max_tokens=5, messages=[{"role": "user", "content": LONG}]),
    "response": request("/v1/responses", input="a"),
    "response, streamed": request("/v1/responses", input="a", stream=True),
    "response, long": request("/v1/responses", input=LONG),
    "response, in the background": request("/v1/responses", input="a", background=True),
    "completion": request("/v1/completions", prompt=["a", "b"], max_tokens=2, logprobs=1),
    "completion, streamed": request("/v1/completions", prompt=["a", "b"], max_tokens=2, logprobs=1, stream=True),
    "generate": post(encoded({"text": ["a", "b"], "stream": True}), path="/generate"),
    "inference": request("/inference/v1/generate", token_ids=[5, 6], sampling_params={"max_tokens": 2}),
    "ping": get("/ping"),
}


class Frontend:
    """A script that answers by what it is asked."""

    def __init__(self) -> None:
        self.at: House
        self.num_open = 0
        self.fails = False

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            asked = self.at.frontends[0].requests[-1]
            if asked.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
            elif self.fails:
                writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}")
            else:
                await says(*(TEXT_CHUNKS if b"/v1/completions" in asked.partition(b"\r\n")[0] else CHUNKS))(
                    reader, writer
                )
        finally:
            self.num_open -= 1


async def left_at(at: House, data: bytes, interruption: Interruption) -> bytes:
    """Answer to a client that leaves once its handler has been interrupted."""
    reader, writer = await at.connect()
    try:
        writer.write(data)
        reading = asyncio.create_task(reader.read())
        while not (interruption.has_come or reading.done()):
            await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return b""
        return reading.result()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def held(at: House) -> dict[str, object]:
    """What requests hold, by what it is; nothing that is 0, or empty."""
    door = at.door
    found = {
        "bodies": door.bodies.num_bytes,
        "turns": door.rewriting._turns._taken or door.rewriting._turns._waiting,
        "reasons": REASONS_AT_ONCE - door.reasons._value,
        "waiting": [each for upstream in door.upstreams._upstreams for each in upstream.waiting],
        "kept": [each for upstream in door.upstreams._upstreams for each in upstream.idle if each._client],
        "connections": door.connections,
    }
    return {name: what for name, what in found.items() if what}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_client_that_leaves_takes_all_along(name: str, fails: bool) -> None:
    frontend = Frontend()
    async with house(frontend) as at:
        frontend.at = at
        whole = await at.ask(REQUESTS[name])
        assert whole.startswith(b"HTTP/1.1 200"), whole
        frontend.fails = fails
        for interruption in interruptions():
            async with nothing_left(interruption):
                with interrupting_tasks("Exchange._run", interruption):
                    answer = await left_at(at, REQUESTS[name], interruption)
                if not interruption.has_come:
                    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 50"))
                async with asyncio.timeout(20):
                    while found := held(at):
                        await asyncio.sleep(0)
            assert not held(at), (interruption, found)
        frontend.fails = False
        async with asyncio.timeout(20):
            assert (await at.ask(REQUESTS[name])).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_error_anywhere_ends_the_answer_once(name: str) -> None:
    """A status says so, or the end of the stream that has begun; nothing is waited for in vain."""
    frontend = Frontend()
    async with house(frontend) as at:
        frontend.at = at
        for interruption in interruptions(OSError(errno.EMFILE, "too many open files"), TimeoutError()):
            async with nothing_left(interruption):
                with interrupting_tasks("Exchange._run", interruption):
                    async with asyncio.timeout(20):
                        answer = await at.ask(REQUESTS[name])
                assert answer.startswith(b"HTTP/1.1 "), interruption
                async with asyncio.timeout(20):
                    while held(at):
                        await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["upload", "batch"])
async def test_a_client_of_batches_that_leaves_takes_all_along(name: str, tmp_path: Path) -> None:
    frontend = Frontend()
    async with house(frontend, batch_dir=str(tmp_path / "batches")) as at:
        frontend.at = at
        at.door.batches = batches = make_batches(at.door)
        assert batches is not None
        await batches.start()
        try:
            content = form(("purpose", b"batch"), ("file", jsonl([line("a"), line("b")])))
            head = "Content-Type: multipart/form-data; boundary=xyz"
            upload = post(content, head, path="/v1/files").replace(b"Content-Type: application/json\r\n", b"")
            file = json.loads((await at.ask(upload)).partition(b"\r\n\r\n")[2])
            asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            data = upload if name == "upload" else post(encoded(asked), path="/v1/batches")
            for interruption in interruptions():
                async with nothing_left(interruption):
                    with interrupting_tasks("Exchange._run", interruption):
                        await left_at(at, data, interruption)
                    async with asyncio.timeout(20):
                        while held(at) or batches.uploads.room.num_bytes or batches._runner._running:
                            await asyncio.sleep(0.001)
                        while list(batches.uploads.directory.iterdir()):
                            await asyncio.sleep(0.001)
            assert (await at.ask(data)).startswith(b"HTTP/1.1 200")
        finally:
            await batches.close()
