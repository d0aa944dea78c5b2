"""The process of a worker whose runtime is ours: it serves until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod

from worker.build import Built
from worker.server import RequestServer


class DirectWorker(ABC):
    """One worker process on a runtime of ours.

    Args:
        built: The engine and its options.

    Attributes:
        server: Serves the requests.
        ready: Set once requests are taken.
    """

    def __init__(self, built: Built) -> None:
        self.arguments = built.arguments
        self.server = RequestServer(
            built.engine, built.arguments, seal=built.seal, smoke=built.smoke, shut_down=self.shut_down
        )
        self.ready = asyncio.Event()
        self._leave = asyncio.Event()

    @abstractmethod
    async def run(self) -> None:
        """Serve until `shut_down`."""

    def shut_down(self) -> None:
        """Stop serving: `run` drains and returns. The second time, the drain ends at once."""
        self._leave.set()
        self.server.signalled()

    def _live(self) -> str | None:
        """The problem that ``/live`` tells, None if there is none."""
        return self.server.broken or (None if self.ready.is_set() else "starting")


def run(worker: DirectWorker) -> None:
    """Serve until SIGTERM or SIGINT. Raises whatever kept the worker from starting."""
    import uvloop

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for name in ("worker", "adapters"):  # whose lines say what was chosen at the start, none of a request
        logging.getLogger(name).setLevel(logging.INFO)
    uvloop.run(_serve(worker))


async def _serve(worker: DirectWorker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.shut_down)
    await worker.run()
