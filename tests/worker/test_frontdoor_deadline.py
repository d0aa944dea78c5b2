"""When a connection of the front door stops waiting, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from worker.frontdoor.deadline import GRACE_S, RESOLUTION_S, WaitingProtocol


class Timer:
    """A timer of `Loop`."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.at = when
        self.callback = callback
        self.cancelled = False

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The event loop, as far as deadlines need one; timers ring when `pass_s` says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.num_set = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, callback))
        self.num_set += 1
        return self.timers[-1]

    @property
    def waiting(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]

    def pass_s(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.waiting if timer.at <= until]:
            first = min(due, key=Timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.callback()
        self.now = until


class Connection(WaitingProtocol):
    def __init__(self) -> None:
        super().__init__()
        self.late_at: list[float] = []

    def _late(self) -> None:
        self.late_at.append(cast(Loop, self._loop).now)


def connection() -> tuple[Connection, Loop]:
    loop = Loop()
    with patch("asyncio.get_running_loop", return_value=loop):
        return Connection(), loop


SECONDS = st.integers(1, 90).map(float)


@given(st.lists(st.tuples(st.sampled_from(["expect", "expect nothing", "pass"]), SECONDS), max_size=30))
def test_late_is_called_once_for_each_deadline_that_passes(steps: list[tuple[str, float]]) -> None:
    waiting, loop = connection()
    expected: list[float] = []
    deadline: float | None = None
    for step, seconds in steps:
        if step == "expect":
            waiting._expect(seconds)
            deadline = loop.now + seconds
        elif step == "expect nothing":
            waiting._expect_nothing()
            deadline = None
        else:
            loop.pass_s(seconds)
            if deadline is not None and deadline <= loop.now:
                expected.append(deadline)
                deadline = None
        assert waiting.late_at == expected
        assert len(loop.waiting) <= 1
    waiting._cancel_timer()
    assert not loop.waiting


def test_a_nearer_deadline_counts_and_one_behind_a_late_one() -> None:
    waiting, loop = connection()
    waiting._expect(10.0)
    waiting._expect(1.0)
    loop.pass_s(5.0)
    assert waiting.late_at == [1.0]
    waiting._expect(GRACE_S / 4)
    loop.pass_s(GRACE_S / 2)
    assert waiting.late_at == [1.0, 5.0 + GRACE_S / 4]


def test_many_requests_share_a_timer() -> None:
    waiting, loop = connection()
    for _ in range(1000):
        for seconds in (10.0, 60.0, 75.0):
            waiting._expect(seconds)
        waiting._expect_nothing()
        loop.pass_s(0.01)
    assert loop.num_set <= 2


def test_a_timer_that_rings_a_little_early_is_not_set_again() -> None:
    waiting, loop = connection()
    waiting._expect(1.0)
    (timer,) = loop.waiting
    loop.now = 1.0 - RESOLUTION_S / 2
    timer.callback()
    assert len(waiting.late_at) == 1


def stopped(loop: Loop, seconds: float) -> None:
    """The process is stopped for so long; then the first timer that is due rings."""
    loop.now += seconds
    timer = min(loop.waiting, key=Timer.when)
    loop.timers.remove(timer)
    timer.callback()


def test_a_process_that_was_stopped_reads_before_it_is_late() -> None:
    """Its loop may call timers before it looks at what has come."""
    waiting, loop = connection()
    waiting._expect(10)
    stopped(loop, 60)
    assert waiting.late_at == []
    waiting._expect(10)
    stopped(loop, 60)
    loop.pass_s(GRACE_S)
    assert waiting.late_at == [120 + GRACE_S]


def test_a_part_that_is_read_after_a_stop_keeps_the_grace() -> None:
    """A body that is late lets nothing be awaited, and the rest of it may have come, too."""
    waiting, loop = connection()
    waiting._expect(10)
    loop.now += 60
    waiting._expect(0)
    loop.pass_s(GRACE_S / 2)
    waiting._expect(0)
    loop.pass_s(GRACE_S / 4)
    assert waiting.late_at == []
    loop.pass_s(GRACE_S / 4)
    assert waiting.late_at == [60 + GRACE_S]
