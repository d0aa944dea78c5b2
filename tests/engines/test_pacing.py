"""Requests that keep coming do not keep those that decode from their tokens."""

from __future__ import annotations

import asyncio

import pytest

from worker.engines.embedded.plan import Output
from worker.engines.embedded.serving import pacing
from worker.engines.embedded.serving.outbox import RUN_AHEAD, Outbox
from worker.engines.embedded.serving.pacing import MAX_GATHER_S, Pacing


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("step_s", [0.0002, 0.005, 0.02, 0.05, 0.07, 0.2, 1.0])
def test_prompts_alone_never_take_two_long_steps_in_a_row(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arrival comes in every step. Steps of prompts alone follow each other for `MAX_GATHER_S`
    at most, and then a step decodes.
    """
    clock, pace = Clock(), Pacing()
    monkeypatch.setattr(pacing, "time", clock)
    pace.note_arrival(is_idle=True)
    kinds, alone_s, longest_s = [], 0.0, 0.0
    for _ in range(1000):
        pace.note_arrival(is_idle=False)
        alone = pace.is_prompts_first
        clock.now_s += step_s
        pace.note_step(prompts_first=alone)
        kinds.append(alone)
        alone_s = alone_s + step_s if alone else 0.0
        longest_s = max(longest_s, alone_s)
    assert longest_s <= MAX_GATHER_S + step_s + 1e-9
    assert not all(kinds)


def test_who_comes_while_others_decode_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(), Pacing()
    monkeypatch.setattr(pacing, "time", clock)
    pace.note_arrival(is_idle=True)
    assert pace.is_prompts_first
    for _ in range(100):
        clock.now_s += 2 * MAX_GATHER_S
        pace.note_step(prompts_first=False)
        pace.note_arrival(is_idle=False)
        assert not pace.is_prompts_first


async def test_steps_that_the_event_loop_collects_hold_nothing() -> None:
    pace, delivered = Pacing(), list[Output]()
    outbox = Outbox(asyncio.get_running_loop(), delivered.extend, pace)
    for number in range(1, 3 * RUN_AHEAD):
        outbox.publish([Output("a")])
        while len(delivered) < number:
            await asyncio.sleep(0)
        assert not pace.is_held
    for _ in range(RUN_AHEAD):
        assert not pace.is_held
        outbox.publish([Output("a")])
    assert pace.is_held
