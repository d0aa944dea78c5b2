"""Several front doors at one port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from ports import free_port

from worker.errors import StartupError
from worker.frontdoor.options import Options
from worker.frontdoor.process import serve
from worker.frontdoor.upstreams import Upstream

NUM_CONNECTIONS = 64


@contextlib.asynccontextmanager
async def serving(options: Options) -> AsyncIterator[asyncio.Task[None]]:
    """A front door in this process; it has ended, or it takes connections."""
    door = asyncio.create_task(serve(options))
    while not door.done():
        await asyncio.sleep(0.01)
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(options.host, options.port)
            writer.close()
            break
    try:
        yield door
    finally:
        door.cancel()
        await asyncio.wait([door])


async def status_of(port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n")
    writer.close()
    return int(head.split()[1])


async def test_two_front_doors_share_the_connections() -> None:
    """They are told apart by the playground, which only one of them has."""
    port = free_port()
    options = Options(upstream=(Upstream("127.0.0.1", 1),), port=port, reuse_port=True, response_store_mib=0)
    async with serving(options) as one, serving(replace(options, playground=True)) as other:
        await asyncio.sleep(0.1)
        statuses = [await status_of(port, "/playground") for _ in range(NUM_CONNECTIONS)]
        assert set(statuses) == {200, 404}
        assert not one.done()
        assert not other.done()


@pytest.mark.parametrize("has_option", [False, True])
async def test_a_port_is_not_shared_unless_both_say_so(has_option: bool) -> None:
    options = Options(upstream=(Upstream("127.0.0.1", 1),), port=free_port(), response_store_mib=0)
    async with serving(replace(options, reuse_port=has_option)):
        with pytest.raises(StartupError, match="cannot serve on"):
            await serve(replace(options, reuse_port=not has_option))
