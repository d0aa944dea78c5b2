"""Work that is interrupted at each place at which it can be, one place after the other."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

END_S = 20.0
"""Seconds for interrupted work to end, and for what it has begun to be gone."""


class Interruption:
    """Cancels work, or makes what it awaits fail, when it suspends for the n-th time.

    Args:
        place: Number of the suspension; 0 is before the first step.
        is_late: Cancel once what is awaited has come, and before the work has seen it.
        error: Raise this where the work has suspended, instead of a cancellation.

    Attributes:
        has_come: Whether the place was reached.
    """

    def __init__(self, place: int, *, is_late: bool = False, error: Exception | None = None) -> None:
        self.place = place
        self.has_come = False
        self._is_late = is_late
        self._error = error

    def __repr__(self) -> str:
        what = "cancelled" if self._error is None else f"{type(self._error).__name__} raised"
        return f"{what} at suspension {self.place}{', late' * self._is_late}"

    async def ended(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The task of the work once it has ended, interrupted or not."""
        task = asyncio.create_task(self.of(work))
        if self.place == 0:
            self._prevent(task, work)
        done, _ = await asyncio.wait({task}, timeout=END_S)
        assert done, f"does not end: {self!r}"
        if not task.cancelled():
            task.exception()  # else it would count as lost
        return task

    def _prevent(self, task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
        """Cancel the task of work before its first step."""
        self.has_come = task.cancel()
        task.add_done_callback(lambda _: work.close())

    async def of(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, which is interrupted in the task that runs this."""
        result: T = await _Driven(work, self)
        return result

    def at(self, awaited: Any) -> Exception | None:
        """Take place at a suspension; returns what is to be raised there at once."""
        self.has_come = True
        if self._error is not None:
            if isinstance(awaited, asyncio.Future):
                awaited._asyncio_future_blocking = False
                awaited.cancel()
            return self._error
        task = asyncio.current_task()
        assert task is not None
        if self._is_late and isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
        return None


class _Driven:
    """Awaits work, and counts its suspensions."""

    def __init__(self, work: Coroutine[Any, Any, Any], interruption: Interruption) -> None:
        self._work = work
        self._interruption = interruption

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        for number in count(1):
            try:
                awaited = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as stop:
                return stop.value
            error = self._interruption.at(awaited) if number == self._interruption.place else None
            if error is None:
                try:
                    yield awaited
                except BaseException as raised:  # whatever it is, the work gets it
                    error = raised
        return None


def interruptions(*errors: Exception) -> Iterator[Interruption]:
    """Interruptions at one place after the other, up to the first that was not reached: early and
    late cancellations, or each of the errors.
    """
    kinds: list[dict[str, Any]] = [{"error": each} for each in errors] or [{}, {"is_late": True}]
    for kind in kinds:
        for place in count(1 if kind else 0):
            interruption = Interruption(place, **kind)
            yield interruption
            if not interruption.has_come:
                break


@contextmanager
def interrupting_tasks(name: str, interruption: Interruption) -> Iterator[None]:
    """Interrupts the first task whose coroutine has this name, made by whoever makes it."""
    loop = asyncio.get_running_loop()
    is_first = True

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal is_first
        is_meant = is_first and getattr(work, "__qualname__", "").endswith(name)
        is_first = is_first and not is_meant
        task = asyncio.Task(interruption.of(work) if is_meant else work, loop=loop, **options)
        if is_meant and interruption.place == 0:
            interruption._prevent(task, work)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(None)


@asynccontextmanager
async def nothing_left(what: object = "") -> AsyncIterator[None]:
    """Afterwards no task is left that was not there before, and no failure was lost."""
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    lost: list[Any] = []
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: lost.append(context))
    try:
        yield
        async with asyncio.timeout(END_S):
            while left := asyncio.all_tasks() - before:
                await asyncio.wait(left, timeout=0.01)
        await asyncio.sleep(0)
        gc.collect(1)  # of what was made since, which is young
        await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"left behind: {asyncio.all_tasks() - before}, {what}") from None
    finally:
        loop.set_exception_handler(handler)
    assert not lost, f"lost: {lost}, {what}"
