"""The paths of OpenAI's files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from worker.frontdoor.batches.requests import batch_listing, file_listing, new_batch
from worker.frontdoor.batches.service import BatchService
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.exchange import Exchange, Handler
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.routes import BATCHES, FILES
from worker.frontdoor.values import printable

ENDPOINTS = (CHAT, COMPLETIONS, "/v1/responses")
"""Paths that requests of batches may be for, where they are served."""

READ_AT_ONCE = 256 * 1024
"""Bytes of a file that are in memory at a time."""


async def upload_file(exchange: Exchange) -> None:
    """POST /v1/files."""
    service = _service(exchange)
    assert exchange.upload is not None
    content_type = exchange.head.headers.get(b"content-type", b"")
    file = await service.add_file(exchange.owner, content_type, exchange.upload)
    await exchange.answer(200, file.as_json())


async def list_files(exchange: Exchange) -> None:
    """GET /v1/files."""
    service = exchange.door.batch_service()
    page = await service.files(exchange.owner, file_listing(exchange.query))
    await exchange.answer(200, page.as_json())


async def get_file(exchange: Exchange) -> None:
    """GET /v1/files/{id}."""
    service = _service(exchange)
    file = await service.file(exchange.owner, exchange.names["id"])
    await exchange.answer(200, file.as_json())


async def delete_file(exchange: Exchange) -> None:
    """DELETE /v1/files/{id}."""
    service = _service(exchange)
    file_id = exchange.names["id"]
    await service.delete_file(exchange.owner, file_id)
    await exchange.answer(200, {"id": file_id, "object": "file", "deleted": True})


async def get_content(exchange: Exchange) -> None:
    """GET /v1/files/{id}/content."""
    service = _service(exchange)
    with await service.open_content(exchange.owner, exchange.names["id"]) as content:
        await exchange.begin_events(b"application/octet-stream")
        while block := await asyncio.to_thread(content.read, READ_AT_ONCE):
            await exchange.send(block)
    await exchange.end()


async def create_batch(exchange: Exchange) -> None:
    """POST /v1/batches."""
    service = _service(exchange)
    endpoints = [path for path in ENDPOINTS if exchange.door.routes.at(path) is not None]
    batch = await service.add_batch(exchange.owner, new_batch(exchange.fields(), endpoints))
    await exchange.answer(200, batch.as_json())


async def list_batches(exchange: Exchange) -> None:
    """GET /v1/batches."""
    service = exchange.door.batch_service()
    page = await service.batches(exchange.owner, batch_listing(exchange.query))
    await exchange.answer(200, page.as_json())


async def get_batch(exchange: Exchange) -> None:
    """GET /v1/batches/{id}."""
    service = _service(exchange)
    batch = await service.batch(exchange.owner, exchange.names["id"])
    await exchange.answer(200, batch.as_json())


async def cancel_batch(exchange: Exchange) -> None:
    """POST /v1/batches/{id}/cancel."""
    service = _service(exchange)
    if exchange.body and exchange.fields():
        raise Refused(400, "a cancellation has no fields")
    batch = await service.cancel_batch(exchange.owner, exchange.names["id"])
    await exchange.answer(200, batch.as_json())


BATCH_HANDLERS: Mapping[tuple[str, str], Handler] = {
    ("GET", FILES): list_files,
    ("POST", FILES): upload_file,
    ("GET", f"{FILES}/{{id}}"): get_file,
    ("DELETE", f"{FILES}/{{id}}"): delete_file,
    ("GET", f"{FILES}/{{id}}/content"): get_content,
    ("GET", BATCHES): list_batches,
    ("POST", BATCHES): create_batch,
    ("GET", f"{BATCHES}/{{id}}"): get_batch,
    ("POST", f"{BATCHES}/{{id}}/cancel"): cancel_batch,
}


def _service(exchange: Exchange) -> BatchService:
    """The service of a path without parameters. Raises `FieldRefused` if there are any."""
    service = exchange.door.batch_service()
    for name in exchange.query:
        raise FieldRefused(printable(name), "no parameter of this path")
    return service
