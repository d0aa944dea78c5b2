"""Answers that wait for a place in the batch, and those that have one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from worker.engines import TokenLogprob
from worker.engines.embedded.offline.results import Answer, RequestGroup
from worker.engines.embedded.plan import Output
from worker.engines.embedded.step import Stepper


@dataclass(frozen=True, slots=True)
class Event:
    """One token of a step for one answer; accepted drafts come before the step's last token.

    Attributes:
        group: The answers to its prompt.
        answer: The answer; it is over if its ``finish_reason`` is set.
        token_id: The sampled token, also where the answer does not show it; None if none was
            sampled.
        logprobs: Log probabilities of the token, even if it was removed with a stop string; None if
            it is not shown.
    """

    group: RequestGroup
    answer: Answer
    token_id: int | None
    logprobs: list[TokenLogprob] | None


class AnswerQueue:
    """Gives answers to a `Stepper`, in order; those to one prompt wait for the first one, whose
    prompt KV they share.

    Args:
        stepper: The stepper, for this queue's exclusive use.
        max_num_live: Answers in the stepper at most.
    """

    def __init__(self, stepper: Stepper, max_num_live: int) -> None:
        self._stepper = stepper
        self._max_num_live = max_num_live
        self._waiting: OrderedDict[str, tuple[RequestGroup, Answer]] = OrderedDict()  # by request id
        self._siblings: dict[str, list[Answer]] = {}  # by the id of the request that they wait for
        self._live: dict[str, tuple[RequestGroup, Answer]] = {}  # in the stepper, by request id

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self._live or self._waiting)

    def add(self, group: RequestGroup) -> None:
        """Queue the answers to a prompt."""
        first, *others = group.answers
        self._waiting[first.request.id] = group, first
        if others:
            self._siblings[first.request.id] = others

    def add_first(self, group: RequestGroup, answers: Iterable[Answer]) -> None:
        """Queue answers to a prompt before all others."""
        for answer in reversed([*answers]):
            self._waiting[answer.request.id] = group, answer
            self._waiting.move_to_end(answer.request.id, last=False)

    def withdraw(self, group: RequestGroup) -> list[Answer]:
        """Remove and return the unfinished answers to a prompt, wherever they are."""
        unfinished = [answer for answer in group.answers if answer.finish_reason is None]
        for answer in unfinished:
            if answer.request.id in self._live:
                self._end_live(answer)
                answer.request.num_computed = 0
            self._siblings.pop(answer.request.id, None)
            self._waiting.pop(answer.request.id, None)
        return unfinished

    def fill(self) -> bool:
        """Add waiting answers to the stepper as long as there is room; whether it has any."""
        while self._waiting and len(self._live) < self._max_num_live:
            _, (group, answer) = self._waiting.popitem(last=False)
            self._live[answer.request.id] = group, answer
            self._stepper.add(answer.request)
        return bool(self._live)

    def take(self, output: Output, time_s: float) -> Event | None:
        """Take a step's output; None if its answer has ended at a stop string in an earlier token.

        Args:
            output: The next output of the step.
            time_s: Time at which the step ended, seconds of `time.perf_counter`.
        """
        if output.request_id not in self._live:
            return None
        group, answer = self._live[output.request_id]
        if output.request_id in self._siblings:
            self.add_first(group, self._siblings.pop(output.request_id))
        answer.take(output, time_s - group.started_s)
        if answer.finish_reason is not None:
            if output.finish_reason is None:
                self._end_live(answer)  # a stop string, which the engine does not see
            else:
                del self._live[output.request_id]
        token_id = output.token_id if output.token_id is not None else output.stop_reason
        return Event(group, answer, token_id, output.logprobs)

    def _end_live(self, answer: Answer) -> None:
        self._stepper.abort(answer.request.id)
        del self._live[answer.request.id]
