"""Prompts to answers without an event loop, for `Engine` and `TextGenerationController`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from threading import Event as Signal
from time import perf_counter

from worker.engines import EngineInfo, FinishReason, TokenLogprob
from worker.engines.embedded.host import FairLock
from worker.engines.embedded.offline.request_builder import Named, RequestBuilder
from worker.engines.embedded.offline.results import Answer, RequestGroup
from worker.engines.embedded.plan import Output
from worker.engines.embedded.step import Stepper
from worker.sampling import SamplingParams

_LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """One token of a step for one answer; accepted drafts come before the step's last token.

    Attributes:
        group: The answers to its prompt.
        answer: The answer; it is over if its ``finish_reason`` is set.
        token_id: The sampled token, also where the answer does not show it; None if none was
            sampled.
        logprobs: Its log probabilities, even if it was removed with a stop string; None if it is
            not shown.
    """

    group: RequestGroup
    answer: Answer
    token_id: int | None
    logprobs: list[TokenLogprob] | None


class Session:
    """Drives a `Stepper`. Thread-safe: calls wait for each other and for the step.

    Callees of a step, such as logits processors, must not call back: that is a `RuntimeError`.

    The answers to one prompt wait for the first one, whose prompt KV they share.

    Args:
        stepper: For this session's exclusive use.
        info: Of the engine.
        builder: Checks prompts and makes requests of them.
    """

    def __init__(self, stepper: Stepper, info: EngineInfo, builder: RequestBuilder) -> None:
        self.stepper = stepper
        self.info = info
        self.builder = builder
        self._groups: dict[str, RequestGroup] = {}
        self._suspended: dict[str, list[Answer]] = {}
        self._waiting: deque[tuple[RequestGroup, Answer]] = deque()
        self._siblings: dict[str, list[Answer]] = {}
        self._live: dict[str, tuple[RequestGroup, Answer]] = {}  # in the stepper, by request id
        self._numbers = count()
        self.lock = FairLock()
        self._changed = Signal()
        self._is_stepping = False

    @property
    def group_ids(self) -> list[str]:
        """Prompts that are not done, suspended ones too, oldest first."""
        return list(self._groups)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self._live or self._waiting)

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
            groups.append(self.builder.build(number, prompt, wanted, processors, shared, f"prompts[{place}]"))
        return groups

    def add(self, group: RequestGroup) -> None:
        """Queue a prompt."""
        with self.lock:
            self._check_not_stepping()
            group.started_s = perf_counter()
            self._groups[group.id] = group
            first, *others = group.answers
            self._waiting.append((group, first))
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
            return [self._take(output, time_s) for output in outputs if self._is_awaited(output)]

    def finish(self, group_id: str) -> None:
        """End every unfinished answer to a prompt as ``stop``, with the tokens that it has; no
        error if it is done.
        """
        self._end(group_id, "stop")

    def abort(self, group_id: str) -> RequestGroup | None:
        """End every unfinished answer to a prompt as ``cancelled``; None if it is not here any
        more.
        """
        return self._end(group_id, "cancelled")

    def suspend(self, group_id: str) -> None:
        """Take a prompt out of the engine; its tokens stay, its KV need not. Once more is no error.

        Raises:
            KeyError: it is not here.
        """
        with self.lock:
            self._check_not_stepping()
            group = self._groups[group_id]
            if group_id not in self._suspended:
                self._suspended[group_id] = self._withdraw(group)

    def resume(self, group_id: str) -> None:
        """Go on with a suspended prompt, before others that wait; its answers are what they would
        have been.

        Raises:
            KeyError: it is not suspended.
        """
        with self.lock:
            self._check_not_stepping()
            group = self._groups[group_id]
            for answer in reversed(self._suspended.pop(group_id)):
                self._waiting.appendleft((group, answer))
            self._changed.set()

    def wait(self) -> None:
        """Wait until there may be something to compute, or another thread ended a prompt."""
        if self.is_idle:
            self._changed.wait(_LONGEST_WAIT_S)
        self._changed.clear()

    def _end(self, group_id: str, reason: FinishReason) -> RequestGroup | None:
        with self.lock:
            self._check_not_stepping()
            group = self._groups.pop(group_id, None)
            if group is None:
                return None
            self._withdraw(group)
            for answer in group.answers:
                if answer.finish_reason is None:
                    answer.end(reason)
            self._suspended.pop(group_id, None)
            self._changed.set()
            return group

    def _check_not_stepping(self) -> None:
        if self._is_stepping:
            raise RuntimeError("a step is in progress, and its callees must not call back")

    def _fill(self) -> None:
        while self._waiting and len(self._live) < self.info.max_num_seqs:
            group, answer = self._waiting.popleft()
            self._live[answer.request.id] = group, answer
            self.stepper.add(answer.request)

    def _is_awaited(self, output: Output) -> bool:
        """Whether the answer has not ended, as it does at a stop string in an earlier token."""
        return output.request_id in self._live

    def _take(self, output: Output, time_s: float) -> Event:
        group, answer = self._live[output.request_id]
        for sibling in reversed(self._siblings.pop(output.request_id, [])):
            self._waiting.appendleft((group, sibling))
        answer.take(output, time_s - group.started_s)
        if answer.finish_reason is not None:
            if output.finish_reason is None:
                self._end_live(answer)  # a stop string, which the engine does not see
            else:
                del self._live[output.request_id]
            self._close(group)
        token_id = output.token_id if output.token_id is not None else output.stop_reason
        return Event(group, answer, token_id, output.logprobs)

    def _end_live(self, answer: Answer) -> None:
        self.stepper.abort(answer.request.id)
        del self._live[answer.request.id]

    def _withdraw(self, group: RequestGroup) -> list[Answer]:
        """Take the unfinished answers of `group` out of wherever they are."""
        mine = [answer for answer in group.answers if answer.finish_reason is None]
        for answer in mine:
            if answer.request.id in self._live:
                self._end_live(answer)
                answer.request.num_computed = 0
            self._siblings.pop(answer.request.id, None)
        self._waiting = deque(one for one in self._waiting if one[0] is not group)
        return mine

    def _close(self, group: RequestGroup) -> None:
        if group.is_done:
            self._groups.pop(group.id, None)
