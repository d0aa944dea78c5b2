"""The check that a step's work does not grow with the history; counts work, measures no time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from time import thread_time
from types import FrameType
from typing import Any, SupportsIndex, overload

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.chain import ProcessorChain
from adapters.testing.reference_runs import chosen, logits_of, prompt_of, step
from adapters.testing.registry import check
from adapters.testing.subject import Case, CheckFailed, Subject

EARLY, LATE, WINDOW = 96, 512, 96
"""History lengths at which work is counted, and the number of steps counted."""

_GROWTH = 1.25
_NUM_CASES = 2


@dataclass
class Work:
    """Average work per step.

    Attributes:
        lines: Lines of Python run.
        history: Tokens read from the history.
        elements: Elements of tensors read and made.
    """

    lines: float = 0.0
    history: float = 0.0
    elements: float = 0.0


_SLACK = Work(lines=30.0, history=24.0, elements=128.0)
"""Tolerated growth: amortised doubling, sets of distinct tokens that fill up."""


@check("cost", "the work of a step does not grow with the length of the history")
def cost(subject: Subject) -> str:
    """See `CHECKS`."""
    remarks = []
    for case in [case for case in subject.cases if case.scope == "all"][:_NUM_CASES]:
        early, late, microseconds = _measure(subject, case)
        if late is None:
            remarks.append(f"{microseconds:.0f} us of CPU time a step, the answer ended early")
            continue
        grown = [
            f"{field.name} from {getattr(early, field.name):.0f} to {getattr(late, field.name):.0f}"
            for field in fields(Work)
            if getattr(late, field.name) > getattr(early, field.name) * _GROWTH + getattr(_SLACK, field.name)
        ]
        if grown and not subject.is_third_party:
            what = f"between {EARLY} and {LATE} generated tokens the work of a step grew: {', '.join(grown)}"
            raise CheckFailed(f"{what}; keep what is needed in advance() ({case})")
        remarks.append(f"{microseconds:.0f} us of CPU time a step" + (f", grows: {', '.join(grown)}" if grown else ""))
    return "; ".join(remarks)


def _measure(subject: Subject, case: Case) -> tuple[Work, Work | None, float]:
    """Work of an early and a late step (None if the answer ended), and CPU time in us."""
    history = _CountingHistory()
    chain = subject.chain(case, tokens=history)
    chain.start(prompt_of(subject.context, 0))
    logits = logits_of(subject.context, 2, 64)
    began = thread_time()
    num_timed = _run(subject, chain, logits, EARLY)
    microseconds = (thread_time() - began) / max(num_timed, 1) * 1e6
    early, _ = _counted(subject, chain, logits, history)
    _run(subject, chain, logits, LATE - EARLY - WINDOW)
    late, num_steps = _counted(subject, chain, logits, history)
    return early, late if num_steps == WINDOW else None, microseconds


def _run(subject: Subject, chain: ProcessorChain, logits: torch.Tensor, num_steps: int) -> int:
    """Steps over a few repeated rows, so that distinct tokens stay few; returns their number."""
    for done in range(num_steps):
        index = chain.position
        token_id = chosen(step(chain, logits[(index * index // 3 + index) % len(logits)]), subject.context)
        if token_id is None:
            return done
        chain.accept(token_id, index)
    return num_steps


def _counted(
    subject: Subject, chain: ProcessorChain, logits: torch.Tensor, history: _CountingHistory
) -> tuple[Work, int]:
    """Average work of the steps of one window, and how many there were."""
    history.num_read = 0
    with _counted_lines() as lines, _ElementCounter() as elements:
        num_steps = _run(subject, chain, logits, WINDOW)
    total = max(num_steps, 1)
    return Work(lines[0] / total, history.num_read / total, elements.count / total), num_steps


class _CountingHistory(list[int]):
    """A history that counts how many of its tokens are read."""

    num_read = 0

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        result = super().__getitem__(index)
        self.num_read += len(result) if isinstance(result, list) else 1
        return result

    def __iter__(self) -> Iterator[int]:
        for token_id in super().__iter__():
            self.num_read += 1
            yield token_id

    def __reversed__(self) -> Iterator[int]:
        for token_id in super().__reversed__():
            self.num_read += 1
            yield token_id

    def __contains__(self, token_id: object) -> bool:
        self.num_read += len(self)
        return super().__contains__(token_id)

    def __add__(self, other: Any) -> Any:
        self.num_read += len(self)
        return super().__add__(other)

    def count(self, token_id: int) -> int:
        self.num_read += len(self)
        return super().count(token_id)

    def index(self, *args: Any) -> int:
        self.num_read += len(self)
        return super().index(*args)

    def copy(self) -> list[int]:
        self.num_read += len(self)
        return super().copy()


class _ElementCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of tensors that operations read and make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (*_tensors(args), *_tensors((result,))):
            self.count += tensor.numel()
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def _counted_lines() -> Iterator[list[int]]:
    """Counts the lines of Python that run, in the first element of the list."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            count[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
