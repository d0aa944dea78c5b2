"""Workers on runtimes of ours, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
