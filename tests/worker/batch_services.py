"""Files and batches without a front door: answers that a test scripts, and uploads as files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from worker.frontdoor.batches import BatchService, Limits
from worker.frontdoor.batches.objects import StoredBatch, StoredFile
from worker.frontdoor.batches.requests import new_batch
from worker.frontdoor.batches.running_batch import Ask
from worker.frontdoor.uploads import Uploads

CHAT = "/v1/chat/completions"
OWNER = "owner-a"
LIMITS = Limits(file=2**20, storage=2**22, concurrency=4, body=2**16)
WAIT_S = 60.0

Models = Callable[[], Awaitable[frozenset[str]]]


def line(custom_id: str, *, url: str = CHAT, model: str = "m", **changed: Any) -> dict[str, Any]:
    """A line of an input file, as it should be unless ``changed``."""
    body = {"model": model, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | changed


def jsonl(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def form(
    *parts: tuple[str, bytes], boundary: str = "xyz", filename: str = "in.jsonl", end: bytes | None = None
) -> bytes:
    """A form; the part ``file`` is a file."""
    written = b""
    for name, content in parts:
        named = f'; filename="{filename}"' if name == "file" else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        written += head.encode() + content + b"\r\n"
    return written + (f"--{boundary}--\r\n".encode() if end is None else end)


def said(body: bytes) -> str:
    """The text of the only message of a request."""
    text: str = json.loads(body)["messages"][0]["content"]
    return text


async def echo(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """The text of the only message, as an answer."""
    return 200, json.dumps({"said": said(body)}).encode()


async def one_model() -> frozenset[str]:
    return frozenset({"m"})


@contextlib.asynccontextmanager
async def service(
    directory: Path, ask: Ask = echo, *, models: Models = one_model, limits: Limits = LIMITS
) -> AsyncIterator[BatchService]:
    """Files and batches in ``directory``, at work."""

    def uploads(at: Path) -> Uploads:
        return Uploads(at, limits.file + 2**16, 1024, 60, time.monotonic)

    made = BatchService(directory, limits, uploads, ask, models)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def uploaded(at: BatchService, content: bytes, owner: str = OWNER) -> StoredFile:
    """A file of requests that a client has uploaded."""
    upload = at.uploads.begin(_not_slow)
    upload.add(form(("purpose", b"batch"), ("file", content)))
    upload.take()
    try:
        return await at.add_file(owner, b"multipart/form-data; boundary=xyz", upload)
    finally:
        upload.free()


async def begun(at: BatchService, content: bytes, owner: str = OWNER, **fields: Any) -> StoredBatch:
    """A batch of the requests in ``content``."""
    file = await uploaded(at, content, owner)
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    return await at.add_batch(owner, new_batch(given, (CHAT, "/v1/completions")))


async def ended(at: BatchService, batch: StoredBatch) -> StoredBatch:
    """The batch once it has ended."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await at.batch(batch.owner, batch.id)).is_finished:
            await asyncio.sleep(0.01)
        return found


async def content_of(at: BatchService, file_id: str | None, owner: str = OWNER) -> list[dict[str, Any]]:
    """The lines of a file of results, none without one."""
    if file_id is None:
        return []
    with await at.open_content(owner, file_id) as file:
        return [json.loads(each) for each in file.read().decode().splitlines()]


async def results_of(at: BatchService, batch: StoredBatch) -> dict[str, dict[str, Any]]:
    """The result of each request of a batch that has ended, by its id; each has one."""
    lines = await content_of(at, batch.output_file_id, batch.owner)
    lines += await content_of(at, batch.error_file_id, batch.owner)
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def _not_slow(refused: Exception) -> None:
    raise AssertionError(refused)
