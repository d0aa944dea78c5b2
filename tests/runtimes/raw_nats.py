"""A NATS client that sends whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType


class RawNats:
    """One connection, without a library between the test and the server.

    Args:
        port: Of the server.
        user: Of the server's users, whose password is ``p``; None where there are none.
    """

    def __init__(self, port: int, user: str | None = None) -> None:
        self._port = port
        self._user = user

    async def __aenter__(self) -> RawNats:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        shown = {"verbose": False, "headers": True, "no_responders": True}
        known = {"user": self._user, "pass": "p"} if self._user else {}
        self._writer.write(b"CONNECT " + json.dumps(shown | known).encode() + b"\r\n")
        await self.flushed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def publish(self, subject: bytes, reply: bytes = b"", data: bytes = b"", headers: bytes | None = None) -> None:
        """Send a message; `headers` are all of their bytes, from ``NATS/1.0`` on."""
        start = subject + b" " + (reply + b" " if reply else b"")
        if headers is None:
            self._writer.write(b"PUB " + start + b"%d\r\n" % len(data) + data + b"\r\n")
        else:
            sizes = b"%d %d\r\n" % (len(headers), len(headers) + len(data))
            self._writer.write(b"HPUB " + start + sizes + headers + data + b"\r\n")

    async def flushed(self) -> list[str]:
        """The errors that the server has answered, once it has taken everything."""
        self._writer.write(b"PING\r\n")
        errors = []  # type: ignore[var-annotated]
        while (line := await self._reader.readline()) != b"PONG\r\n":
            if not line:
                raise ConnectionError(f"the server has closed the connection: {errors}")
            if line.startswith(b"-ERR"):
                errors.append(line.decode(errors="replace"))
        return errors

    async def subscribe_and_read_no_more(self, subject: bytes) -> None:
        """Be a slow consumer: what is sent from now on stays in the buffers of the system."""
        self._writer.write(b"SUB " + subject + b" 1\r\n")
        await self.flushed()
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]
