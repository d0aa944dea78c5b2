"""The sandbox process kept running: started, restarted with growing pauses, and watched."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from adapters.grammars.sandbox.jobs import Jobs
from adapters.grammars.sandbox.process import SandboxProcess

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
"""Longest pause between attempts to start the process."""


class Supervisor:
    """Runs one sandbox process at a time, and tells jobs how their children end.

    All methods run in the sandbox's thread; other threads read the attributes.

    Args:
        tables: Makes the bytes of every id. ``CancelledError`` if there are none, which is not
            logged.
        jobs: Jobs that compile in the process.

    Attributes:
        selector: Selects the events of the process.
        process: The process; None between a failure and the next start.
        problem: Reason of the last start that failed; empty before, and once a process is ready.
        settled: Set once the first start has succeeded or failed.
        num_restarts: Processes that had been ready and were replaced.
    """

    def __init__(self, tables: Callable[[], dict[str, Any]], jobs: Jobs) -> None:
        self.selector = selectors.DefaultSelector()
        self.process: SandboxProcess | None = None
        self.problem = ""
        self.settled = threading.Event()
        self.num_restarts = 0
        self._tables, self._jobs = tables, jobs
        self._num_failures = 0
        self._retry_at = 0.0

    @property
    def is_free(self) -> bool:
        """Whether the process can take a job at once."""
        return self.process is not None and self.process.is_ready and not self.process.unsent

    @property
    def deadlines(self) -> list[float]:
        """Monotonic times at which a start or an answer is due, seconds."""
        return [self._retry_at] if self.process is None else self.process.deadlines

    def start_if_due(self) -> None:
        """Start the process if there is none and the pause is over; select its present events."""
        if self.process is None and time.monotonic() >= self._retry_at:
            try:
                self.process = SandboxProcess(self._tables)
            except CancelledError:  # the caller has no tokenizer, and says why
                self._retry_at = time.monotonic() + MAX_BACKOFF_S
                self.fail("has no tokenizer")
            except Exception as error:  # any fault of the tokenizer or the system: logged, and retried
                self._lose(f"cannot start: {error}")
            else:
                self.selector.register(self.process.channel, self.process.events)
        elif self.process is not None:
            self.selector.modify(self.process.channel, self.process.events)

    def handle(self, events: int) -> None:
        """Write and read as the selected ``events`` of the process allow."""
        if events & selectors.EVENT_WRITE:
            self.write(SandboxProcess.flush)
        if events & selectors.EVENT_READ and self.process is not None:
            self._receive(self.process)

    def check(self) -> None:
        """Replace the process if it does not answer in time."""
        overdue = None if self.process is None else self.process.overdue(time.monotonic())
        if overdue is not None:
            self._lose(overdue)

    def write(self, call: Callable[[SandboxProcess], None]) -> None:
        """Let ``call`` write to the process, if there is one."""
        if self.process is None:
            return
        try:
            call(self.process)
        except OSError as error:
            self._lose(f"cannot be written to: {error}")

    def _receive(self, process: SandboxProcess) -> None:
        messages = process.receive()
        if messages is None:
            self._lose("the process ended")
            return
        for message in messages:
            if "ready" in message:
                process.is_ready = True
                self.problem = ""
                self.settled.set()
                logger.info("grammar sandbox: ready after %g s, %.0f MiB", message["ready"], message["rss"] / 2**20)
            elif "failed" in message:
                self._lose(message["failed"])
                return
            else:
                self._num_failures = 0
                self._jobs.child_ended(message["id"], message["status"], message["result"])

    def _lose(self, reason: str) -> None:
        """End the process: its jobs wait for the next one, or fail if this one did not start."""
        process, self.process = self.process, None
        was_ready = process is not None and process.is_ready
        if process is not None:
            if process.channel.fileno() >= 0:
                self.selector.unregister(process.channel)
            process.end()
        self._num_failures += 1
        self.num_restarts += was_ready
        pause_s = 0.0 if self._num_failures == 1 else min(MAX_BACKOFF_S, 0.25 * 2**self._num_failures)
        self._retry_at = time.monotonic() + pause_s
        self._jobs.requeue(reason)
        logger.warning("grammar sandbox: %s", reason)
        if not was_ready:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """Fail every job: no process can be started."""
        self.problem = reason
        self._jobs.fail_all(reason)
        self.settled.set()

    def end(self) -> None:
        """End the process for good."""
        if self.process is not None:
            self.process.end()
            self.process = None
        self.selector.close()
