"""The circuit breaker: opens on repeated failures, rests, is on probation, and closes on
success.
"""

from __future__ import annotations

import pytest

from worker.errors import ProcessorUnavailable
from worker.processors.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker(["acme"], limit=3, window_s=10, rest_s=5, clock=clock)


def test_opens_at_the_limit_within_the_window(breaker, clock) -> None:
    assert [breaker.record("acme") for _ in range(3)] == [False, False, True]
    with pytest.raises(ProcessorUnavailable, match="logits processor acme has failed too often; try again in 5 s"):
        breaker.check(["min_tokens", "acme"])
    breaker.check(["min_tokens"])
    assert breaker.open_names() == ["acme"]


def test_slow_failures_do_not_open_it(breaker, clock) -> None:
    for _ in range(10):
        assert not breaker.record("acme")
        clock.now += 6
    breaker.check(["acme"])


def test_when_half_open_one_failure_opens_and_one_success_closes(breaker, clock) -> None:
    for _ in range(3):
        breaker.record("acme")
    clock.now = 6
    breaker.check(["acme"])
    assert breaker.record("acme")
    clock.now = 12
    breaker.record_success(["acme"])
    assert not breaker.record("acme")
    breaker.check(["acme"])


def test_a_success_during_the_rest_changes_nothing(breaker, clock) -> None:
    for _ in range(3):
        breaker.record("acme")
    breaker.record_success(["acme"])
    with pytest.raises(ProcessorUnavailable):
        breaker.check(["acme"])


def test_built_ins_never_trip_it(breaker) -> None:
    assert not any(breaker.record("json_schema") for _ in range(100))
    breaker.check(["json_schema"])


def test_metrics_are_read_while_a_breaker_opens(breaker) -> None:
    """Another thread reads them: a scrape failed where a breaker opened in the middle of it."""

    class Changing(float):
        def __gt__(self, now: float) -> bool:
            breaker._open_until[f"another {len(breaker._open_until)}"] = 0.0
            return float(self) > now

    breaker._open_until = {"a": Changing(1e9), "b": Changing(1e9)}
    assert breaker.open_names() == ["a", "b"]
