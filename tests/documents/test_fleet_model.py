"""The simulation behind docs/scale.md: what can be said of it without running it."""

from __future__ import annotations

import math
import sys

import pytest
from document_pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from fleet_model import BY_PREFIX, IN_TURN, OF_TWO, Fleet, Load, Request, Worker, disaggregated

WORKER = Worker(step_s=0.02, prompt_rate=10_000, slots=4, budget=512)
LOAD = Load(rate=20, seconds=20, prompt=100, answer=20, shared=0.5, groups=5)


def test_one_request_takes_its_steps() -> None:
    (done,) = Fleet(1, WORKER, path_s=0.1).run([Request(1.0, prompt=1000, answer=5)])
    first_s = 1.1 + (0.02 + 512 / 10_000) + (0.02 + 488 / 10_000)  # two steps' budgets
    assert math.isclose(done.first_s, first_s)
    assert math.isclose(done.last_s, first_s + 4 * 0.02)
    assert math.isclose(done.gap_s, 0.02)


def test_a_prompt_is_a_gap_for_those_that_decode() -> None:
    early, late = Fleet(1, WORKER).run([Request(0.0, 1, 50), Request(0.5, 400, 2)])
    assert math.isclose(early.gap_s, (0.02 + 400 / 10_000) + 0.02)  # a step of the prompt alone, and one of both
    assert late.done == 2


@pytest.mark.parametrize("router", [IN_TURN, OF_TWO, BY_PREFIX])
@pytest.mark.parametrize("kill", [0.0, 0.3])
def test_every_token_comes_once(router: str, kill: float) -> None:
    asked = [one.answer for one in LOAD.requests(1)]
    done = Fleet(10, WORKER, router, LOAD.shared).run(list(LOAD.requests(1)), kill, 10.0)
    assert [one.done for one in done] == asked
    assert all(one.at_s < one.first_s <= one.last_s < math.inf for one in done)


def test_a_request_that_moves_goes_on_where_it_was() -> None:
    """It computes the prompt and what it has of the answer again."""
    (done,) = Fleet(2, WORKER).run([Request(0.0, 100, 50)], kill=0.0)
    fleet = Fleet(2, WORKER)
    fleet._turn = -1  # the first worker has it, and dies in the middle of a step
    moved, _ = fleet.run([Request(0.0, 100, 50), Request(0.5, 1, 1)], kill=0.5, kill_at_s=0.32)
    before = math.floor((0.32 - 0.03) / 0.02) + 1
    again_s = 0.02 + (100 + before) / 10_000
    other_s = 0.02 + 1 / 10_000  # a step of its prompt alone
    assert math.isclose(moved.last_s, 0.32 + again_s + (50 - before - 1) * 0.02 + other_s)
    assert moved.last_s > done.last_s
    assert moved.first_s == done.first_s


def test_apart_nobody_waits_for_prompts_between_tokens() -> None:
    requests = list(LOAD.requests(1))
    done = disaggregated(requests, prefill=3, decode=7, worker=WORKER, handoff_s=1e-5)
    assert [one.done for one in done] == [one.answer for one in requests]
    assert max(one.gap_s for one in done) < 2 * 0.021
    assert all(
        after.first_s > before.at_s + before.prompt / 10_000 for before, after in zip(requests, done, strict=True)
    )
