"""Grammars on their way through the sandbox: queued, compiling, and how each ended."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from adapters.grammars.sandbox.feedback_queue import FeedbackQueue, Level, QueueEntry, levels_up_to
from adapters.grammars.sandbox.verdict import TIME_SIGNALS, Limits, SandboxBusy, SandboxUnavailable, Verdict


@dataclass(eq=False)
class Job(QueueEntry):
    """One grammar to compile.

    Attributes:
        id: Number in messages to the process and from it.
        grammar: The grammar in llguidance's JSON form.
        known: Called before the grammar compiles; a verdict makes compiling unnecessary.
        future: Receives the verdict.
        deadline: Monotonic time at which the caller stops waiting, seconds.
        num_starts: Attempts on its present level.
    """

    id: int = 0
    grammar: str = ""
    known: Callable[[], Verdict | None] | None = None
    future: Future[Verdict] = field(default_factory=Future)
    deadline: float = 0.0
    num_starts: int = 0


class Jobs:
    """Jobs that wait for a slot or compile. The sandbox's thread owns them.

    Args:
        limits: Limits of each grammar.
        max_waiting: Length of the queue.
        max_wait_s: Wall time for waiting and compiling, seconds.
        observe: Called with the outcome and the wall time of every job.

    Attributes:
        counts: Grammars by outcome; may be read in any thread, as the two numbers.
        num_waiting: Jobs without a slot.
        num_running: Jobs that compile.
    """

    def __init__(
        self, limits: Limits, max_waiting: int, max_wait_s: float, observe: Callable[[str, float], None] | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.num_waiting = 0
        self.num_running = 0
        self.limits, self.max_wait_s = limits, max_wait_s
        self._observe = observe
        levels = levels_up_to(limits.timeout_s, len(os.sched_getaffinity(0)))
        self._queue: FeedbackQueue[Job] = FeedbackQueue(levels, max_waiting)
        self._running: dict[int, Job] = {}
        self._num_jobs = 0

    def __iter__(self) -> Iterator[Job]:
        return iter(self._queue)

    def add(self, job: Job) -> None:
        """Queue ``job``; if the queue is full, a job of the client with the most entries fails."""
        self._num_jobs += 1
        job.id = self._num_jobs
        evicted = self._queue.add(job)
        if evicted is not None:
            self.fail(evicted, SandboxBusy("too many grammars wait to be compiled"))

    def start_next(self) -> tuple[Job, Level] | None:
        """Give the next job a slot; None if none waits or every slot is taken."""
        while (job := self._queue.take()) is not None:
            verdict = job.known() if job.known is not None else None
            if verdict is None:
                job.num_starts += 1
                self._running[job.id] = job
                return job, self._queue.levels[job.level]
            self._queue.remove(job)
            self._resolve(job, verdict)
        return None

    def remove(self, job: Job) -> bool:
        """Remove ``job`` from the queue; whether it was compiling."""
        self._queue.remove(job)
        return self._running.pop(job.id, None) is not None

    def child_ended(self, job_id: int, status: int, result: dict[str, Any] | None) -> None:
        """Settle a job by the end of its child; a job that was removed before is ignored.

        Args:
            job_id: The job.
            status: Wait status of the child.
            result: Message of the child, None if there is none.
        """
        job = self._running.pop(job_id, None)
        if job is None:
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in TIME_SIGNALS and self._queue.promote(job):
            job.num_starts = 0
            return
        self._queue.remove(job)
        if number == signal.SIGKILL:  # the system's out-of-memory killer: this process kills removed jobs only
            self.fail(job, SandboxBusy("the system has no memory to compile it"))
        elif not number and status:  # before it compiled: the grammar has no part in that
            self.fail(job, SandboxBusy("the system starts no process or thread to compile it"))
        else:
            self._resolve(job, self.limits.verdict(number, result))

    def requeue(self, reason: str) -> None:
        """Queue all that compile again, since their process is gone; each job only once."""
        running, self._running = list(self._running.values()), {}
        for job in running:
            if job.num_starts > 1:
                self._queue.remove(job)
                self.fail(job, SandboxUnavailable(reason))
            else:
                self._queue.put_back(job)

    def fail(self, job: Job, error: SandboxBusy | SandboxUnavailable) -> None:
        """Settle a job that has been removed, without a verdict."""
        if job.future.set_running_or_notify_cancel():
            self.count(error.outcome, job)
            job.future.set_exception(error)

    def fail_all(self, reason: str) -> None:
        """Settle every job as `SandboxUnavailable`."""
        for job in list(self._queue):
            self._queue.remove(job)
            self.fail(job, SandboxUnavailable(reason))

    def _resolve(self, job: Job, verdict: Verdict) -> None:
        if job.future.set_running_or_notify_cancel():
            self.count(verdict.outcome, job)  # first, because a waiting caller may read the counts
            job.future.set_result(verdict)

    def count(self, outcome: str, job: Job) -> None:
        """Count a job that ends."""
        self.counts[outcome] += 1
        self.publish()
        if self._observe is not None:
            self._observe(outcome, time.monotonic() - (job.deadline - self.max_wait_s))

    def publish(self) -> None:
        """Update the numbers that other threads read."""
        self.num_waiting, self.num_running = self._queue.num_waiting, self._queue.num_running
