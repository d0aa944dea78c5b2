"""The process of a worker whose runtime is ours: it serves until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol


class RunsWorker(Protocol):
    """A worker on a runtime of ours."""

    async def run(self) -> None:
        """Serve until `shut_down`."""

    def shut_down(self) -> None:
        """Stop serving: `run` drains and returns. The second time, the drain ends at once."""


def run(worker: RunsWorker) -> None:
    """Serve until SIGTERM or SIGINT. Raises whatever kept the worker from starting."""
    import uvloop

    uvloop.run(_serve(worker))


async def _serve(worker: RunsWorker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.shut_down)
    await worker.run()
