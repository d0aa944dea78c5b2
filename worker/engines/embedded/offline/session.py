"""Prompts to answers without an event loop, for `Engine` and `TextGenerationController`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from threading import Event as Signal
from time import perf_counter

from worker.engines import EngineInfo, FinishReason
from worker.engines.embedded.host import FairLock
from worker.engines.embedded.offline.request_builder import Desk, Named
from worker.engines.embedded.offline.results import Answer, Job
from worker.engines.embedded.plan import Output
from worker.engines.embedded.step import Stepper
from worker.sampling import SamplingParams

_LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """Result of one step for one answer.

    Attributes:
        job: Its prompt.
        answer: The answer; finished if its ``finish_reason`` is set.
        token_id: The sampled token, even if the answer does not show it; None if none was sampled.
    """

    job: Job
    answer: Answer
    token_id: int | None


class Session:
    """Drives a `Stepper`. Thread-safe: calls wait for each other and for the step.

    Callees of a step, such as logits processors, must not call back: that is a `RuntimeError`.

    The answers to one prompt wait for the first one, whose prompt KV they share.

    Args:
        stepper: For this session's exclusive use.
        info: Of the engine.
        desk: Checks prompts and builds requests from them.
    """

    def __init__(self, stepper: Stepper, info: EngineInfo, desk: Desk) -> None:
        self.stepper = stepper
        self.info = info
        self.desk = desk
        self._jobs: dict[str, Job] = {}
        self._suspended: dict[str, list[Answer]] = {}
        self._waiting: deque[tuple[Job, Answer]] = deque()
        self._siblings: dict[str, list[Answer]] = {}
        self._live: dict[str, tuple[Job, Answer]] = {}  # in the stepper, by request id
        self._numbers = count()
        self.lock = FairLock()
        self._changed = Signal()
        self._is_stepping = False

    @property
    def job_ids(self) -> list[str]:
        """Unfinished prompts, including suspended ones, oldest first."""
        return list(self._jobs)

    @property
    def suspended_ids(self) -> list[str]:
        """Prompts that are suspended."""
        return list(self._suspended)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self._live or self._waiting)

    def job(self, job_id: str) -> Job:
        """An unfinished prompt. Raises `KeyError` if there is none of that id."""
        return self._jobs[job_id]

    def prepare(
        self, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams], named: Sequence[Sequence[Named]]
    ) -> list[Job]:
        """Check prompts and make jobs of them; nothing is queued yet.

        Raises:
            InvalidRequest: one of them cannot be served; the field starts with its index.
        """
        uses: Counter[int] = Counter()
        for one in params:
            for processor in one.logits_processors:
                uses[id(processor)] += one.best_of or 1
        shared = frozenset(key for key, number in uses.items() if number > 1)
        jobs = []
        for index, (prompt, wanted, processors) in enumerate(zip(prompts, params, named, strict=True)):
            with self.lock:
                number = next(self._numbers)
            jobs.append(self.desk.job(number, prompt, wanted, processors, shared, f"prompts[{index}]"))
        return jobs

    def add(self, job: Job) -> None:
        """Queue a prompt."""
        with self.lock:
            self._check_not_stepping()
            job.started_s = perf_counter()
            self._jobs[job.id] = job
            first, *others = job.answers
            self._waiting.append((job, first))
            if others:
                self._siblings[first.request.id] = others
            self._changed.set()

    def step(self) -> list[Event]:
        """Compute one step; empty if there is nothing to compute."""
        with self.lock:
            self._check_not_stepping()
            self._fill()
            if not self._live:
                return []
            self._is_stepping = True
            try:
                outputs = self.stepper.step()
            finally:
                self._is_stepping = False
            time_s = perf_counter()
            return [self._take(output, time_s) for output in outputs]

    def finish(self, job_id: str) -> None:
        """End a prompt's unfinished answers as ``stop`` with their tokens; no error if done."""
        self._end(job_id, "stop")

    def abort(self, job_id: str) -> Job | None:
        """End a prompt's unfinished answers as ``cancelled``; None if it is gone."""
        return self._end(job_id, "cancelled")

    def suspend(self, job_id: str) -> None:
        """Take a prompt out of the engine; it keeps its tokens, and may lose its KV. Idempotent.

        Raises:
            KeyError: it is not here.
        """
        with self.lock:
            self._check_not_stepping()
            job = self._jobs[job_id]
            if job_id not in self._suspended:
                self._suspended[job_id] = self._withdraw(job)

    def resume(self, job_id: str) -> None:
        """Continue a suspended prompt, before waiting ones, with unchanged results.

        Raises:
            KeyError: it is not suspended.
        """
        with self.lock:
            self._check_not_stepping()
            job = self._jobs[job_id]
            for answer in reversed(self._suspended.pop(job_id)):
                self._waiting.appendleft((job, answer))
            self._changed.set()

    def wait(self) -> None:
        """Wait until there may be something to compute, or another thread ended a prompt."""
        if self.is_idle:
            self._changed.wait(_LONGEST_WAIT_S)
        self._changed.clear()

    def _end(self, job_id: str, reason: FinishReason) -> Job | None:
        with self.lock:
            self._check_not_stepping()
            job = self._jobs.pop(job_id, None)
            if job is None:
                return None
            self._withdraw(job)
            for answer in job.answers:
                if answer.finish_reason is None:
                    answer.end(reason)
            self._suspended.pop(job_id, None)
            self._changed.set()
            return job

    def _check_not_stepping(self) -> None:
        if self._is_stepping:
            raise RuntimeError("a step is in progress, and its callees must not call back")

    def _fill(self) -> None:
        while self._waiting and len(self._live) < self.info.max_num_seqs:
            job, answer = self._waiting.popleft()
            self._live[answer.request.id] = job, answer
            self.stepper.add(answer.request)

    def _take(self, output: Output, time_s: float) -> Event:
        job, answer = self._live[output.request_id]
        for sibling in reversed(self._siblings.pop(output.request_id, [])):
            self._waiting.appendleft((job, sibling))
        answer.take(output, time_s - job.started_s)
        if answer.finish_reason is not None:
            if output.finish_reason is None:
                self._end_live(answer)  # a stop string, which the engine does not see
            else:
                del self._live[output.request_id]
            self._close(job)
        token_id = output.token_id if output.token_id is not None else output.stop_reason
        return Event(job, answer, token_id)

    def _end_live(self, answer: Answer) -> None:
        self.stepper.abort(answer.request.id)
        del self._live[answer.request.id]

    def _withdraw(self, job: Job) -> list[Answer]:
        """Remove the unfinished answers of `job` from the stepper or the queue."""
        mine = [answer for answer in job.answers if answer.finish_reason is None]
        for answer in mine:
            if answer.request.id in self._live:
                self._end_live(answer)
                answer.request.num_computed = 0
            self._siblings.pop(answer.request.id, None)
        self._waiting = deque(one for one in self._waiting if one[0] is not job)
        return mine

    def _close(self, job: Job) -> None:
        if job.is_done:
            self._jobs.pop(job.id, None)
