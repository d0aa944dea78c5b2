"""Work that is repeated for as long as a worker takes batches, whatever goes wrong in it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from nats.errors import Error as NatsError

logger = logging.getLogger(__name__)

RETRY_S = 0.25
"""Pause after a failure."""

PASSES_S = 5.0
"""Seconds that NATS may fail a loop before that is a failed health check; others are at once."""

Step = Callable[[], Awaitable[None]]


class Loops:
    """Runs steps again and again: what one raises is logged, is a failed health check until the
    step succeeds, and ends no loop.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failing: dict[str, tuple[float, str]] = {}
        self._stopped = False

    @property
    def problem(self) -> str | None:
        """A failure that lasts, None if there is none."""
        now_s = time.monotonic()
        return next((text for visible_s, text in self._failing.values() if now_s >= visible_s), None)

    def begin(self, name: str, step: Step) -> None:
        """Repeat ``step`` from now on; ``name`` says what it does."""
        task = self._tasks[name] = asyncio.create_task(self._repeat(name, step))
        task.add_done_callback(lambda _: self._ended(name, step))

    def stop(self) -> None:
        """End all loops."""
        self._stopped = True
        for task in self._tasks.values():
            task.cancel()

    async def _repeat(self, name: str, step: Step) -> None:
        while True:
            try:
                await step()
                self._failing.pop(name, None)
            except Exception as error:  # the boundary of a loop that serves every batch
                self._failed(name, error)
                await asyncio.sleep(RETRY_S)

    def _failed(self, name: str, error: BaseException) -> None:
        passes = isinstance(error, (TimeoutError, NatsError, OSError))
        if not passes:
            logger.error("batches: cannot %s", name, exc_info=error)
        else:
            logger.debug("batches: cannot %s: %r", name, error)
        text = f"batches: cannot {name}: {str(error) or type(error).__name__}"
        since_s = time.monotonic() + (PASSES_S if passes else 0.0)
        self._failing[name] = (min(since_s, self._failing.get(name, (since_s, ""))[0]), text)

    def _ended(self, name: str, step: Step) -> None:
        """A loop's task is over: begun again, unless all are to end."""
        if not self._stopped:
            self._failed(name, RuntimeError("its task has ended"))
            self.begin(name, step)
