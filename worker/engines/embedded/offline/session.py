"""Prompts to answers without an event loop, for `Engine` and `TextGenerationController`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from threading import Event as Signal
from time import perf_counter

import torch

from worker.engines import EngineInfo, FinishReason
from worker.engines.embedded.host import FairLock
from worker.engines.embedded.offline.answer_queue import AnswerQueue, Event
from worker.engines.embedded.offline.request_builder import Named, RequestBuilder
from worker.engines.embedded.offline.results import Answer, RequestGroup
from worker.engines.embedded.plan import Output
from worker.engines.embedded.step import Stepper
from worker.sampling import SamplingParams

_LONGEST_WAIT_S = 0.1


class Session:
    """Drives a `Stepper`. Thread-safe: calls wait for each other and for the step.

    Callees of a step, such as logits processors, must not call back: that is a `RuntimeError`.

    Args:
        stepper: The stepper, for this session's exclusive use.
        info: Description of the engine.
        builder: Checks prompts and makes requests of them.

    Attributes:
        stepper, info, builder: The same.
        lock: Held during each call.
        num_ended: Number of prompts that were ended, not by their last token.
    """

    def __init__(self, stepper: Stepper, info: EngineInfo, builder: RequestBuilder) -> None:
        self.stepper = stepper
        self.info = info
        self.builder = builder
        self._groups: dict[str, RequestGroup] = {}
        self._suspended: dict[str, list[Answer]] = {}
        self._queue = AnswerQueue(stepper, info.max_num_seqs)
        self._numbers = count()
        self.lock = FairLock()
        self.num_ended = 0
        self._changed = Signal()
        self._events: list[Event] = []  # that no call of `step` has returned
        self._is_stepping = False
        self._process = os.getpid()

    @property
    def group_ids(self) -> list[str]:
        """Prompts that are not done, suspended ones too, oldest first."""
        return list(self._groups)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, and nothing to return."""
        return self._queue.is_idle and not self._events

    def prepare(
        self, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams], named: Sequence[Sequence[Named]]
    ) -> list[RequestGroup]:
        """Check prompts and make requests of them; nothing is queued yet.

        Raises:
            InvalidRequest: one of them cannot be served; the field starts with its index.
        """
        uses: Counter[int] = Counter()
        for one in params:
            for processor in one.logits_processors:
                uses[id(processor)] += one.best_of or 1
        shared = frozenset(key for key, number in uses.items() if number > 1)
        groups = []
        for place, (prompt, wanted, processors) in enumerate(zip(prompts, params, named, strict=True)):
            with self.lock:
                number = next(self._numbers)
            group = self.builder.build(number, prompt, wanted, processors, shared, f"prompts[{place}]")
            for answer in group.answers:
                self.stepper.check(answer.request, f"prompts[{place}].")
            groups.append(group)
        return groups

    def add(self, group: RequestGroup) -> None:
        """Queue a prompt."""
        with self.lock:
            self._check_not_stepping()
            group.started_s = perf_counter()
            self._groups[group.id] = group
            self._queue.add(group)
            self._changed.set()

    def step(self) -> list[Event]:
        """Compute one step; empty if there is nothing to compute.

        After an exception the next call returns what the step has given before it, too.

        Raises `RuntimeError` in a process that was forked from the model's: it lacks its threads.
        """
        if os.getpid() != self._process and torch.get_num_threads() > 1:
            raise RuntimeError(
                "this process was forked from the one that loaded the model, and has none of its threads: call "
                "torch.set_num_threads(1) before, or load the model here"
            )
        with self.lock:
            self._check_not_stepping()
            if self._queue.fill():
                self._is_stepping = True
                try:
                    self._take(self.stepper.step())
                except BaseException:  # an interrupt, say
                    self._take(self.stepper.recover())
                    raise
                finally:
                    self._is_stepping = False
            events, self._events = self._events, []
            for event in events:
                if event.group.is_done:
                    self._groups.pop(event.group.id, None)
            return events

    def _take(self, outputs: Iterable[Output]) -> None:
        time_s, left = perf_counter(), iter(outputs)
        try:
            for output in left:
                event = self._queue.take(output, time_s)
                if event is not None:
                    self._events.append(event)
        except BaseException:  # the others' tokens are none the less theirs
            self._take(left)
            raise

    def end(self, group_id: str, reason: FinishReason) -> RequestGroup | None:
        """End every unfinished answer to a prompt, with the tokens that it has.

        Args:
            group_id: Id of the prompt.
            reason: Finish reason of those answers.

        Returns:
            The answers, None if the prompt is done, or was ended before.
        """
        with self.lock:
            self._check_not_stepping()
            group = self._groups.pop(group_id, None)
            if group is None:
                return None
            for answer in self._queue.withdraw(group):
                answer.end(reason)
            self._suspended.pop(group_id, None)
            self._events = [event for event in self._events if event.group is not group]
            self.num_ended += 1
            self._changed.set()
            return group

    def abort(self, group_id: str) -> RequestGroup | None:
        """End every unfinished answer to a prompt as ``cancelled``; see `end`."""
        return self.end(group_id, "cancelled")

    def suspend(self, group_id: str) -> None:
        """Take a prompt out of the engine; its tokens stay, its KV need not. Once more is no error.

        Raises:
            KeyError: it is not here.
        """
        with self.lock:
            self._check_not_stepping()
            group = self._groups[group_id]
            if group_id not in self._suspended:
                self._suspended[group_id] = self._queue.withdraw(group)

    def resume(self, group_id: str) -> None:
        """Continue a suspended prompt, before others that wait, with unchanged answers.

        Raises:
            KeyError: it is not suspended.
        """
        with self.lock:
            self._check_not_stepping()
            group = self._groups[group_id]
            self._queue.add_first(group, self._suspended.pop(group_id))
            self._changed.set()

    def wait(self) -> None:
        """Wait until there may be something to compute, or another thread ended a prompt."""
        if self.is_idle:
            self._changed.wait(_LONGEST_WAIT_S)
        self._changed.clear()

    def _check_not_stepping(self) -> None:
        if self._is_stepping:
            raise RuntimeError("a step is in progress, and its callees must not call back")
