"""The sandbox's thread: one loop over the process, calls from other threads, and deadlines."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from adapters.grammars.sandbox.feedback_queue import Level
from adapters.grammars.sandbox.jobs import Job, Jobs
from adapters.grammars.sandbox.supervisor import Supervisor
from adapters.grammars.sandbox.verdict import SandboxBusy, SandboxUnavailable

logger = logging.getLogger(__name__)


class Inbox:
    """Calls from other threads, and a socket that wakes the thread that runs them. Thread-safe.

    Attributes:
        socket: Readable when there are calls, or when the inbox was closed.
        is_closed: Whether calls are refused.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self.socket, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def put(self, call: Callable[[], None]) -> bool:
        """Let the other thread run ``call``; False if the inbox is closed."""
        with self._lock:
            if self.is_closed:
                return False
            self._calls.append(call)
        self._wake_up()
        return True

    def close(self) -> None:
        """Refuse further calls, and wake the other thread. Idempotent."""
        with self._lock:
            self.is_closed = True
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake.send(b"!")

    def run_calls(self) -> None:
        """Run the calls in their order."""
        while self._calls:
            self._calls.popleft()()

    def close_sockets(self) -> None:
        """Close both ends of the socket."""
        self.socket.close()
        self._wake.close()


class Driver:
    """Hands jobs to the process and fails late ones. All methods run in the sandbox's thread.

    Args:
        jobs: Jobs to compile.
        supervisor: Runs the process.

    Attributes:
        inbox: Calls from other threads.
    """

    def __init__(self, jobs: Jobs, supervisor: Supervisor) -> None:
        self.inbox = Inbox()
        self._jobs, self._supervisor = jobs, supervisor
        supervisor.selector.register(self.inbox.socket, selectors.EVENT_READ)

    def run(self) -> None:
        """Run until the inbox is closed."""
        reason = "is closed"
        try:
            while not self.inbox.is_closed:
                self._turn()
        except Exception as error:  # the thread's boundary: waiting callers must be told
            logger.exception("the grammar sandbox's thread failed")
            reason = f"failed: {type(error).__name__}"
        finally:
            self.inbox.close()
            self._supervisor.end()
            self.inbox.run_calls()
            self._supervisor.fail(reason)
            self.inbox.close_sockets()

    def _turn(self) -> None:
        """One iteration: handle events since the last one, then start what can run."""
        self._supervisor.start_if_due()
        for key, events in self._supervisor.selector.select(self._patience(time.monotonic())):
            if key.fileobj is self.inbox.socket:
                self.inbox.socket.recv(4096)
            else:
                self._supervisor.handle(events)
        self.inbox.run_calls()
        self._supervisor.check()
        now = time.monotonic()
        for job in [job for job in self._jobs if now >= job.deadline]:
            if not job.future.done():  # else it failed with the process, lost as an earlier job was killed
                self._remove(job)
                self._jobs.fail(job, SandboxBusy(f"it was not compiled within {self._jobs.max_wait_s:g} s"))
        while self._supervisor.is_free and (started := self._jobs.start_next()) is not None:
            self._compile(*started)
        self._jobs.publish()

    def _compile(self, job: Job, level: Level) -> None:
        self._supervisor.write(lambda process: process.compile(job.id, job.grammar, level, self._jobs.limits))

    def _patience(self, now: float) -> float | None:
        """Seconds until something is due, None if nothing is."""
        due = [*(job.deadline for job in self._jobs), *self._supervisor.deadlines]
        return max(0.0, min(due) - now) if due else None

    def add(self, job: Job) -> None:
        """Queue ``job``, if its future is still waited for."""
        if job.future.done():
            return
        if self._supervisor.process is None and self._supervisor.problem:
            self._jobs.fail(job, SandboxUnavailable(self._supervisor.problem))
        else:
            self._jobs.add(job)

    def cancel(self, job: Job) -> None:
        """Dequeue ``job``, or kill its child."""
        self._remove(job)
        self._jobs.count("cancelled", job)

    def _remove(self, job: Job) -> None:
        if self._jobs.remove(job):
            self._supervisor.write(lambda process: process.kill_child(job.id))
