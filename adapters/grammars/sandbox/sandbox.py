"""`GrammarSandbox`: compiles a grammar in a separate process first, where a crash is harmless.

One thread of this process drives the sandbox process (`adapters.grammars.sandbox_process`), which
forks a child for each grammar. A child has limits of processor time, memory and stack; a grammar
that exceeds one costs nothing but its child. Rationale: `docs/decisions/0009-grammar-sandbox.md`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

from adapters.grammars.sandbox.driver import Driver
from adapters.grammars.sandbox.jobs import Job, Jobs
from adapters.grammars.sandbox.process import START_TIMEOUT_S
from adapters.grammars.sandbox.supervisor import Supervisor
from adapters.grammars.sandbox.verdict import MEMORY_BYTES, STACK_BYTES, TIMEOUT_S, Limits, SandboxUnavailable, Verdict

MAX_WAITING = 256
"""Length of the queue."""


class GrammarSandbox:
    """Compiles grammars in children of a separate process. All methods are thread-safe.

    Args:
        tables: Makes the bytes of every id (`adapters.grammars.compiler.byte_tables`); called in a
            thread. ``CancelledError``, of a future, if there are none.
        timeout_s: Processor time per grammar, seconds; waiting and the machine's load do not count.
        memory_bytes: Memory per grammar.
        stack_bytes: Stack per grammar.
        max_waiting: Length of the queue; if full, the client with the most entries loses its last.
        max_wait_s: Wall time for waiting and compiling; by default 25 times `timeout_s`, as long
            as it takes beside an engine that keeps every core busy, and at least 10 s.
        observe: Called with the outcome and the wall time of every grammar.

    Attributes:
        limits: Limits of each grammar.
        counts: Grammars by outcome; besides those of `Verdict` ``busy``, ``cancelled`` and
            ``unavailable``.
    """

    def __init__(
        self,
        tables: Callable[[], dict[str, Any]],
        *,
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = MEMORY_BYTES,
        stack_bytes: int = STACK_BYTES,
        max_waiting: int = MAX_WAITING,
        max_wait_s: float | None = None,
        observe: Callable[[str, float], None] | None = None,
    ) -> None:
        self.limits = Limits(timeout_s, memory_bytes, stack_bytes)
        max_wait_s = max(10.0, 25 * timeout_s) if max_wait_s is None else max_wait_s
        self._jobs = Jobs(self.limits, max_waiting, max_wait_s, observe)
        self.counts = self._jobs.counts
        self._supervisor = Supervisor(tables, self._jobs)
        self._driver = Driver(self._jobs, self._supervisor)
        self._thread = threading.Thread(target=self._driver.run, name="grammar-sandbox", daemon=True)

    def __repr__(self) -> str:
        state = self._supervisor.problem or ("ready" if self.pid else "starting")
        if self._driver.inbox.is_closed:
            state = "ended"
        return f"GrammarSandbox({state}, {self.num_running} running, {self.num_waiting} waiting)"

    def __enter__(self) -> GrammarSandbox:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id, once the process has loaded the tokenizer."""
        process = self._supervisor.process
        return process.pid if process is not None and process.is_ready else None

    @property
    def num_waiting(self) -> int:
        """Grammars waiting for a slot."""
        return self._jobs.num_waiting

    @property
    def num_running(self) -> int:
        """Grammars being compiled."""
        return self._jobs.num_running

    @property
    def num_restarts(self) -> int:
        """Processes that had been ready and were replaced."""
        return self._supervisor.num_restarts

    def start(self) -> None:
        """Start the process; returns at once."""
        self._thread.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the process has loaded the tokenizer.

        Raises:
            SandboxUnavailable: it cannot be started, or takes longer.
        """
        if not self._supervisor.settled.wait(timeout_s):
            raise SandboxUnavailable(f"was not ready within {timeout_s:g} s")
        if self._supervisor.problem:
            raise SandboxUnavailable(self._supervisor.problem)

    def submit(
        self, grammar: str, client: Hashable | None = None, known: Callable[[], Verdict | None] | None = None
    ) -> Future[Verdict]:
        """Compile ``grammar``; cancelling the future dequeues it, or kills its child, at once.

        Args:
            grammar: The grammar in llguidance's JSON form.
            client: Clients are served round robin; None counts as a separate client.
            known: Called before the grammar compiles; a verdict makes compiling unnecessary.

        The future's errors: `SandboxBusy`, `SandboxUnavailable`.
        """
        deadline = time.monotonic() + self._jobs.max_wait_s
        job = Job(object() if client is None else client, grammar=grammar, known=known, deadline=deadline)
        # A weak reference, because a job and its future would keep each other, and the grammar.
        job.future.add_done_callback(partial(_cancel, self._driver, ref(job)))
        if not self._driver.inbox.put(partial(self._driver.add, job)):
            job.future.set_exception(SandboxUnavailable("is closed"))
        return job.future

    def close(self) -> None:
        """Kill the process; waiting grammars fail as `SandboxUnavailable`. Idempotent."""
        self._driver.inbox.close()
        if self._thread.ident is not None:
            self._thread.join()


def _cancel(driver: Driver, job: ref[Job], future: Future[Verdict]) -> None:
    """Cancel the job of a cancelled future; called in any thread, however the future ended."""
    cancelled = job() if future.cancelled() else None
    if cancelled is not None:
        driver.inbox.put(partial(driver.cancel, cancelled))
