"""The simulation behind docs/scale.md: what can be said of it without running it."""

from __future__ import annotations

import math
import re
import sys

import pytest
from document_pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import fleet
import plots
from fleet_model import BY_PREFIX, IN_TURN, OF_TWO, Fleet, Load, Request, Worker, disaggregated
from fleet_plan import figures, plan

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
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


def cells(row: str) -> list[str]:
    """The cells of the row of `docs/scale.md` that begins so, behind its first one."""
    (found,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip().replace(",", "") for cell in found.split("|")]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("front door", "front door"),
        ("Dynamo's frontend", "Dynamo's frontend"),
        ("nats-server, in place of frontends", "NATS"),
    ],
)
def test_the_page_has_the_measured_costs(row: str, part: str) -> None:
    cost = figures()["parts"][part]
    request, token, rate, stream = cells(row)
    assert (request, token) == (f"{cost['request_us']:.0f}", f"{cost['token_us']:.1f}")
    assert rate == f"{1e6 / (cost['request_us'] + 128 * cost['token_us']):.0f}"
    assert not stream or stream.startswith(f"{cost['stream_kib']:.0f} KiB")


@pytest.mark.parametrize(("row", "rate"), [("10⁴", 1e4), ("10⁶", 1e6)])
def test_the_page_has_what_the_plan_says(row: str, rate: float) -> None:
    wanted = plan(Load(rate / 60, 60, 512), Worker(step_s=0.02, slots=64))
    workers, doors, frontends, etcd, nats, _ = cells(row)
    assert [int(workers), int(doors), int(frontends)] == [wanted[k] for k in ("workers", "front doors", "frontends")]
    assert int(etcd.split()[0]) == wanted["cores of an etcd boundary store"]
    assert int(nats.split()[0]) == wanted["cores of a NATS boundary store"]
    if rate == 1e6:
        assert f"it is {wanted['cores of NATS servers in place of frontends']} cores of nats-server" in PAGE


@pytest.mark.parametrize("name", ["parts", "workers"])  # the third is a simulation
def test_the_plots_are_of_the_measured_values(name: str) -> None:
    drawn = {"parts": plots.parts, "workers": plots.many_workers}[name]()
    assert (ROOT / "docs" / f"scale-{name}.svg").read_text(encoding="utf-8") == drawn, "run benchmarks/plots.py"


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        *[("--requests-per-minute", value, "must be a number above 0") for value in ("0", "-5", "nan", "inf", "x")],
        *[("--step-s", value, "must be a number above 0") for value in ("0", "nan")],
        *[("--kill", value, "must be at least 0 and below 1") for value in ("1", "-1", "2", "x")],
        *[("--shared", value, "must be at least 0 and below 1") for value in ("2", "nan")],
        *[
            (name, "0", "an integer of at least 1")
            for name in ("--slots", "--prompt", "--answer", "--groups", "--check")
        ],
        ("--workers", "-1", "must be an integer of at least 1"),
    ],
)
def test_a_fleet_that_cannot_be(
    option: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet.py", f"{option}={value}"])
    with pytest.raises(SystemExit):
        fleet.main()
    assert f"argument {option}: " in (said := capsys.readouterr().err)
    assert problem in said


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--workers", "1", "--kill", "0.01"], "argument --kill: none of 1 workers would be left"),
        (["--workers", "3", "--kill", "0.7"], "argument --kill: none of 3 workers would be left"),
        (["--workers", "1", "--disaggregate"], "argument --disaggregate: expected at least 2 workers, got 1"),
    ],
)
def test_a_fleet_in_which_nobody_answers(
    argv: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet.py", "--seconds", "1", "--requests-per-minute", "60", *argv])
    with pytest.raises(SystemExit):
        fleet.main()
    assert problem in capsys.readouterr().err
