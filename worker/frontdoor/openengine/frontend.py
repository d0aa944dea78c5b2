"""`EngineFrontend`: stands where Dynamo's frontend would, in this process, before workers behind
OpenEngine.

The rest of the front door speaks HTTP to it, over pairs of sockets instead of the network: a reader
that is slow, a client that leaves, choices and retries are what they are with Dynamo's frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from worker.frontdoor.http import MAX_HEAD
from worker.frontdoor.openengine.exchange import Engines, Request, answer
from worker.frontdoor.upstreams import Upstream, UpstreamConnection

_END_OF_HEAD = b"\r\n\r\n"


class EngineFrontend(Upstream):
    """The one frontend before all workers behind OpenEngine.

    Args:
        engines: The workers, and what is known of their model.
    """

    def __init__(self, engines: Engines) -> None:
        super().__init__("openengine", 80)
        self._engines = engines
        self._serving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to follow the states of the workers."""
        self._engines.workers.start()

    async def stop(self) -> None:
        """End what is under way, and the channels to the workers."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._engines.workers.close()

    async def open(self, connection: UpstreamConnection) -> None:
        """Connect ``connection`` to this frontend."""
        theirs, ours = socket.socketpair()
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=theirs)
        task = asyncio.create_task(self._serve(ours))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def __str__(self) -> str:
        return ", ".join(str(each.address) for each in self._engines.workers)

    async def _serve(self, ours: socket.socket) -> None:
        """Answer the requests of one connection, one after the other."""
        reader, writer = await asyncio.open_connection(sock=ours, limit=2 * MAX_HEAD)
        heading = asyncio.create_task(reader.readuntil(_END_OF_HEAD))
        try:
            while True:
                request = await _read(await heading, reader)
                heading = asyncio.create_task(reader.readuntil(_END_OF_HEAD))
                await self._answer(request, writer, heading)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the connection has ended
        finally:
            heading.cancel()
            await asyncio.gather(heading, return_exceptions=True)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter, heading: asyncio.Task[bytes]) -> None:
        """Answer a request, unless the connection ends before."""
        answering = asyncio.create_task(answer(self._engines, request, writer))
        try:
            await asyncio.wait({heading, answering}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() or heading.exception() is None:
                await answering
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await answering


async def _read(head: bytes, reader: asyncio.StreamReader) -> Request:
    """The request of the front door with this head."""
    first, *lines = head.removesuffix(_END_OF_HEAD).split(b"\r\n")
    method, target, _ = first.split(b" ", 2)
    pairs = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return Request(method.decode(), target.partition(b"?")[0].decode("latin-1"), headers, body)
