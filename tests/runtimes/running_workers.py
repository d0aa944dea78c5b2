"""Workers on runtimes of ours, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from worker.runtimes.direct.process import DirectWorker

W = TypeVar("W", bound=DirectWorker)


@asynccontextmanager
async def taking_requests(worker: W) -> AsyncIterator[W]:
    """The worker, once it takes requests; it has left afterwards."""
    serving = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready.wait())
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        yield worker
    finally:
        ready.cancel()
        worker.shut_down()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def make_certificate(directory: Path) -> None:
    """Write ``cert.pem`` and ``key.pem`` of a server on loopback."""
    assert ssl.OPENSSL_VERSION_INFO >= (1, 1, 1)
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
