"""`GrammarSandbox`: compiles a grammar in a separate process first, where a crash is harmless.

One thread of this process drives the sandbox process (`adapters.grammars.sandbox_process`), which
forks a child for each grammar. A child has limits of processor time, memory and stack; a grammar
that exceeds one costs nothing but its child. Rationale: `docs/decisions/0009-grammar-sandbox.md`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from weakref import ref

from adapters.grammars.feedback_queue import FeedbackQueue, QueueEntry, levels_up_to
from adapters.grammars.sandbox_process import Frames, frame

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""Processor time for compiling, seconds."""

MEMORY_BYTES = 256 * 1024 * 1024
"""Memory for compiling, bytes."""

STACK_BYTES = 2 * 1024 * 1024
"""Stack for compiling, bytes: a quarter of a thread's default, enough for 200 nested objects."""

MAX_WAITING = 256
"""Length of the queue."""

START_TIMEOUT_S = 60.0
"""Time for the process to load the tokenizer."""

MAX_BACKOFF_S = 30.0
"""Longest pause between attempts to start the process."""

KILL_TIMEOUT_S = 5.0
"""Time for the process to confirm that a killed child is gone."""

Outcome = Literal["compiled", "refused", "time", "memory", "stack", "crashed"]

_BOOT = (
    "import sys, types; package = types.ModuleType('adapters'); package.__path__ = [sys.argv[2]]; "
    "sys.modules['adapters'] = package; sys.path[:] = sys.argv[3:]; "
    "from adapters.grammars.sandbox_process import main; main()"
)
"""Imports the process's module without `adapters` itself, which would import torch."""


class SandboxBusy(Exception):
    """The queue is full, or the grammar waited too long; it may be tried again."""


class SandboxUnavailable(Exception):
    """The process cannot be started, or the sandbox is closed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sandbox's result for one grammar.

    Attributes:
        outcome: ``compiled``, ``refused`` by llguidance, or the limit that was exceeded.
        problem: Why it is refused, one short line; empty if it compiled.
        num_bytes: Memory of the compiled grammar, bytes.
        cpu_s: Processor time of compiling, seconds.
    """

    outcome: Outcome
    problem: str = ""
    num_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(eq=False)
class _Job(QueueEntry):
    id: int = 0
    grammar: str = ""
    known: Callable[[], Verdict | None] | None = None
    future: Future[Verdict] = field(default_factory=Future)
    deadline: float = 0.0
    num_starts: int = 0


class GrammarSandbox:
    """Compiles grammars in children of a separate process. All methods are thread-safe.

    Args:
        tables: Makes the bytes of every id (`adapters.grammars.compiler.byte_tables`); called in a
            thread.
        timeout_s: Processor time per grammar, seconds; waiting and the machine's load do not count.
        memory_bytes: Memory per grammar.
        stack_bytes: Stack per grammar.
        max_waiting: Length of the queue; if full, the client with the most entries loses its last.
        max_wait_s: Wall time for waiting and compiling; by default 25 times `timeout_s`, as long
            as it takes beside an engine that keeps every core busy, and at least 10 s.
        observe: Called with the outcome and the wall time of every grammar.

    Attributes:
        counts: Grammars by outcome; besides those of `Verdict` ``busy``, ``cancelled`` and
            ``unavailable``.
        num_restarts: How often a process that had been ready was replaced.
        num_waiting: Grammars waiting for a slot.
        num_running: Grammars being compiled.
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
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.stack_bytes = stack_bytes
        self.counts: Counter[str] = Counter()
        self.num_restarts = 0
        self.num_waiting = 0
        self.num_running = 0
        self._max_wait_s = max(10.0, 25 * timeout_s) if max_wait_s is None else max_wait_s
        self._observe = observe
        self._tables = tables
        self._queue: FeedbackQueue[_Job] = FeedbackQueue(
            levels_up_to(timeout_s, len(os.sched_getaffinity(0))), max_waiting
        )
        self._running: dict[int, _Job] = {}
        self._killed: dict[int, float] = {}
        self._num_jobs = 0
        self._process: _Process | None = None
        self._frames = Frames()
        self._num_failures = 0
        self._retry_at = 0.0
        self._failure = ""
        self._settled = threading.Event()
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._ended = False
        self._awake, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="grammar-sandbox", daemon=True)

    def __repr__(self) -> str:
        state = "ended" if self._ended else self._failure or ("ready" if self.pid else "starting")
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
        process = self._process
        return process.pid if process is not None and process.is_ready else None

    def start(self) -> None:
        """Start the process; returns at once."""
        self._thread.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the process has loaded the tokenizer.

        Raises:
            SandboxUnavailable: it cannot be started, or takes longer.
        """
        if not self._settled.wait(timeout_s):
            raise SandboxUnavailable(f"was not ready within {timeout_s:g} s")
        if self._failure:
            raise SandboxUnavailable(self._failure)

    def submit(
        self, grammar: str, client: Hashable | None = None, known: Callable[[], Verdict | None] | None = None
    ) -> Future[Verdict]:
        """Compile ``grammar``; cancelling the future dequeues it, or kills its child, at once.

        Args:
            grammar: In llguidance's JSON form.
            client: Clients are served round robin; None counts as a separate client.
            known: Called before the grammar compiles; a verdict makes compiling unnecessary.

        The future's errors: `SandboxBusy`, `SandboxUnavailable`.
        """
        deadline = time.monotonic() + self._max_wait_s
        job = _Job(object() if client is None else client, grammar=grammar, known=known, deadline=deadline)
        job.future.add_done_callback(partial(self._done, ref(job)))  # each would keep the other, and the grammar
        if not self._tell(partial(self._add, job)):
            job.future.set_exception(SandboxUnavailable("is closed"))
        return job.future

    def close(self) -> None:
        """Kill the process; what waits ends as `SandboxUnavailable`. Idempotent."""
        with self._lock:
            self._ended = True
        self._wake_up()
        if self._thread.ident is not None:
            self._thread.join()

    # Below: methods that run in the sandbox thread

    def _tell(self, call: Callable[[], None]) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._inbox.append(call)
        self._wake_up()
        return True

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake.send(b"!")

    def _run(self) -> None:
        reason = "is closed"
        try:
            while not self._ended:
                self._turn()
        except Exception as error:  # the thread's boundary: waiting callers must be told
            logger.exception("the grammar sandbox's thread failed")
            reason = f"failed: {type(error).__name__}"
        finally:
            with self._lock:
                self._ended = True
                inbox, self._inbox = list(self._inbox), deque()
            if self._process is not None:
                self._process.end()
                self._process = None
            for call in inbox:
                call()
            self._failure = reason
            self._fail_all(reason)
            self._settled.set()
            self._selector.close()
            self._awake.close()
            self._wake.close()

    def _turn(self) -> None:
        """One iteration: handle events since the last one, then start what can run."""
        now = time.monotonic()
        if self._process is None and now >= self._retry_at:
            self._start_process()
        if self._process is not None:
            self._selector.modify(self._process.channel, self._process.events)
        for key, events in self._selector.select(self._patience(time.monotonic())):
            if key.fileobj is self._awake:
                self._awake.recv(4096)
                continue
            if events & selectors.EVENT_WRITE:
                self._send()
            if events & selectors.EVENT_READ and self._process is not None:
                self._receive()
        while self._inbox:
            self._inbox.popleft()()
        self._expire(time.monotonic())
        self._run_next()
        self.num_waiting, self.num_running = self._queue.num_waiting, self._queue.num_running

    def _patience(self, now: float) -> float | None:
        """Seconds until something is due, None if nothing is."""
        due = [job.deadline for job in self._queue]
        due += [since + KILL_TIMEOUT_S for since in self._killed.values()]
        if self._process is None:
            due.append(self._retry_at)
        elif not self._process.is_ready:
            due.append(self._process.start_deadline)
        return max(0.0, min(due) - now) if due else None

    def _start_process(self) -> None:
        self._frames = Frames()
        try:
            self._process = _Process(self._tables())
        except Exception as error:  # any fault of the tokenizer or the system: logged, and retried
            self._lost(f"cannot start: {error}")
            return
        self._selector.register(self._process.channel, self._process.events)

    def _receive(self) -> None:
        assert self._process is not None
        try:
            data = self._process.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lost("the process ended")
            return
        for message in self._frames.feed(data):
            if "ready" in message:
                self._process.is_ready = True
                self._failure = ""
                self._settled.set()
                logger.info("grammar sandbox: ready after %g s, %.0f MiB", message["ready"], message["rss"] / 2**20)
            elif "failed" in message:
                self._lost(message["failed"])
                return
            else:
                self._ended_child(message["id"], message["status"], message["result"])

    def _lost(self, reason: str) -> None:
        """The process is gone: its grammars wait for the next one, or fail if it does not start."""
        process, self._process = self._process, None
        was_ready = process is not None and process.is_ready
        if process is not None:
            if process.channel.fileno() >= 0:
                self._selector.unregister(process.channel)
            process.end()
        self._num_failures += 1
        self.num_restarts += was_ready
        self._retry_at = time.monotonic() + (0.0 if self._num_failures == 1 else self._backoff())
        self._killed.clear()
        running, self._running = list(self._running.values()), {}
        for job in running:
            if job.num_starts > 1:
                self._queue.remove(job)
                self._fail(job, "unavailable", SandboxUnavailable(reason))
            else:
                self._queue.put_back(job)
        logger.warning("grammar sandbox: %s", reason)
        if not was_ready:
            self._failure = reason
            self._fail_all(reason)
            self._settled.set()

    def _backoff(self) -> float:
        return float(min(MAX_BACKOFF_S, 0.25 * 2**self._num_failures))

    def _add(self, job: _Job) -> None:
        if job.future.done():
            return
        if self._process is None and self._failure:
            self._fail(job, "unavailable", SandboxUnavailable(self._failure))
            return
        self._num_jobs += 1
        job.id = self._num_jobs
        gone = self._queue.add(job)
        if gone is not None:
            self._fail(gone, "busy", SandboxBusy("too many grammars wait to be compiled"))

    def _done(self, job: ref[_Job], future: Future[Verdict]) -> None:
        """A future is done, possibly cancelled; called in any thread."""
        cancelled = job() if future.cancelled() else None
        if cancelled is not None:
            self._tell(partial(self._cancel, cancelled))

    def _cancel(self, job: _Job) -> None:
        self._stop(job)
        self._count("cancelled", job)

    def _stop(self, job: _Job) -> None:
        self._queue.remove(job)
        if self._running.pop(job.id, None) is not None:
            self._killed[job.id] = time.monotonic()
            self._send({"id": job.id})

    def _run_next(self) -> None:
        while self._process is not None and self._process.is_ready and not self._process.unsent:
            job = self._queue.take()
            if job is None:
                return
            verdict = job.known() if job.known is not None else None
            if verdict is not None:
                self._queue.remove(job)
                self._resolve(job, verdict)
                continue
            level = self._queue.levels[job.level]
            job.num_starts += 1
            self._running[job.id] = job
            self._send(
                {
                    "id": job.id,
                    "grammar": job.grammar,
                    "cpu_s": level.cpu_s,
                    "nice": level.nice,
                    "memory": self.memory_bytes,
                    "stack": self.stack_bytes,
                }
            )

    def _send(self, message: dict[str, Any] | None = None) -> None:
        """Write ``message`` and what is left of earlier ones, as much as the process takes now."""
        if self._process is None:
            return
        try:
            self._process.send(b"" if message is None else frame(message))
        except OSError as error:
            self._lost(f"cannot be written to: {error}")

    def _ended_child(self, job_id: int, status: int, result: dict[str, Any] | None) -> None:
        self._num_failures = 0
        job = self._running.pop(job_id, None)
        if job is None:
            self._killed.pop(job_id, None)
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in (signal.SIGPROF, signal.SIGXCPU) and self._queue.promote(job):
            job.num_starts = 0
            return
        self._queue.remove(job)
        if number == signal.SIGKILL:  # not ours: the system's out-of-memory killer
            self._fail(job, "busy", SandboxBusy("the system has no memory to compile it"))
        else:
            self._resolve(job, self._verdict(number, result))

    def _verdict(self, number: int, result: dict[str, Any] | None) -> Verdict:
        if result is not None and "bytes" in result:
            return Verdict("compiled", num_bytes=result["bytes"], cpu_s=result["cpu_s"])
        if result is not None:
            return Verdict("refused", result["refused"])
        if number in (signal.SIGPROF, signal.SIGXCPU):
            return Verdict("time", f"takes more than {self.timeout_s:g} s of processor time to compile")
        if number == signal.SIGABRT:
            return Verdict("memory", f"takes more than {self.memory_bytes / 2**20:g} MiB of memory to compile")
        if number in (signal.SIGSEGV, signal.SIGBUS):
            limit = f"takes more than {self.stack_bytes / 2**20:g} MiB of stack to compile"
            return Verdict("stack", f"{limit}: it is chained or nested too deeply")
        return Verdict("crashed", "crashes the compiler")

    def _expire(self, now: float) -> None:
        if self._process is not None:
            if not self._process.is_ready and now >= self._process.start_deadline:
                self._lost(f"was not ready within {START_TIMEOUT_S:g} s")
            elif any(now - since > KILL_TIMEOUT_S for since in self._killed.values()):
                self._lost("does not answer")
        for job in [job for job in self._queue if now >= job.deadline]:
            self._stop(job)
            self._fail(job, "busy", SandboxBusy(f"it was not compiled within {self._max_wait_s:g} s"))

    def _resolve(self, job: _Job, verdict: Verdict) -> None:
        if job.future.set_running_or_notify_cancel():
            self._count(verdict.outcome, job)  # first, because a waiting caller may read the counts
            job.future.set_result(verdict)

    def _fail(self, job: _Job, outcome: str, error: Exception) -> None:
        if job.future.set_running_or_notify_cancel():
            self._count(outcome, job)
            job.future.set_exception(error)

    def _fail_all(self, reason: str) -> None:
        for job in list(self._queue):
            self._queue.remove(job)
            self._fail(job, "unavailable", SandboxUnavailable(reason))

    def _count(self, outcome: str, job: _Job) -> None:
        self.counts[outcome] += 1
        self.num_waiting, self.num_running = self._queue.num_waiting, self._queue.num_running
        if self._observe is not None:
            self._observe(outcome, time.monotonic() - (job.deadline - self._max_wait_s))


class _Process:
    """The sandbox process, starting with its tokenizer.

    Attributes:
        channel: Non-blocking, because the driving thread has deadlines.
        unsent: Sent data that the process has not read yet.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, tables: dict[str, Any]) -> None:
        package = Path(__file__).resolve().parents[1]
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        command = [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno()), str(package), *filter(None, sys.path)]
        # One arena, so that the allocator's count is the grammar's and no arena's address space
        # counts towards its limit.
        environ = {**os.environ, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        try:
            with theirs:
                fds = [theirs.fileno()]
                self._child = subprocess.Popen(command, stdin=quiet, stdout=quiet, env=environ, pass_fds=fds)
        except OSError:
            self.channel.close()
            raise
        self.pid = self._child.pid
        self.is_ready = False
        self.start_deadline = time.monotonic() + START_TIMEOUT_S
        self.unsent = bytearray(frame(tables))  # megabytes, read once it has started

    @property
    def events(self) -> int:
        """Events to select on `channel`."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def send(self, data: bytes) -> None:
        """Append ``data`` to the unsent bytes, and write as much as possible now.

        Raises:
            OSError: the process has closed the socket.
        """
        self.unsent += data
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                del self.unsent[: self.channel.send(self.unsent)]

    def end(self) -> None:
        """Kill it, and with it its children."""
        self.channel.close()
        self._child.kill()
        self._child.wait()
