"""A fleet that is reckoned: a discrete-event simulation of workers behind doors and frontends.

    .venv/bin/python benchmarks/fleet.py --requests-per-minute 10000
    .venv/bin/python benchmarks/fleet.py --requests-per-minute 1000000 --workers 4000 --kill 0.01
    .venv/bin/python benchmarks/fleet.py --check 2 4 8 16

A worker is its batch: a step takes `step_s` and a share of `prompt_rate` for the prompts' tokens in
it, as ``--engine constant`` does; requests wait for one of `slots` rows, and prompts for the token
budget of a step. Requests go to the workers in turn, as Dynamo's frontend sends them by default;
with ``--router`` to the one with the fewest unfinished ones of two that are drawn, or, with
``--shared`` and the KV router, to the one that has their prefix. What front doors, frontends,
boundary stores and NATS take comes from `results/*.json` (`fleet_plan.py`). A killed worker's
requests go on elsewhere: prompt and answer so far are computed again there, as exact migration
does. ``--disaggregate`` splits the same number of workers into prefill and decode workers; a
token's KV takes ``--handoff-us``.

Prints throughput, time to first token and longest gap between two tokens (p50, p99, p99.9).
``--check`` drives real workers with ``--engine constant`` behind Dynamo's frontend with the same
arrivals (open loop: nobody waits for an answer before asking), and prints measured / reckoned.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop
from fleet_model import ANSWER, BY_PREFIX, IN_TURN, OF_TWO, Fleet, Load, Request, Worker, disaggregated
from fleet_plan import FRONTEND, figures, needed, plan
from machine import processor_name
from open_loop import Ask, drive, quantiles
from parts import MODEL, running
from serve import HERE, end_on_sigterm, stream_completion

KEPT, REPORT = HERE / "results" / "fleet.json", HERE / "results" / "fleet.md"

CHECK_RATE, CHECK_REQUESTS = 3.6, 600
"""Of `--check`: requests a second for each worker, about 0.75 of what it can do, and in all."""


def summary(requests: Sequence[Request], seconds: float) -> str:
    first = quantiles([one.first_s - one.at_s for one in requests])
    gaps = quantiles([one.gap_s for one in requests])
    rate = sum(one.done for one in requests) / max(seconds, max(one.last_s for one in requests))
    shown = [" / ".join(f"{value * 1e3:,.0f}" for value in values) for values in (first, gaps)]
    return f"{rate:,.0f} tokens/s; first token {shown[0]} ms; longest gap {shown[1]} ms (p50 / p99 / p99.9)"


def check(count: int, worker: Worker, load: Load, rounds: int) -> str:
    """Tokens per second, and p50 and p99 of the first token, measured / reckoned; medians."""
    requests = list(load.requests(7))
    measured: list[tuple[float, ...]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        running(Path(directory), worker.step_s, worker.slots, count) as stack,
    ):

        def ask(request: Request) -> Ask:
            return functools.partial(stream_completion, stack.frontend_port, MODEL, request.answer)

        due, asks = [one.at_s for one in requests], [ask(one) for one in requests]
        uvloop.run(drive([0.0] * 8, asks[:8]))  # warm-up
        for _ in range(rounds):
            timings = uvloop.run(drive(due, asks))
            first = quantiles([one.first_s - one.due_s for one in timings])
            rate = sum(one.answer for one in requests) / max(one.end_s for one in timings)
            pairs = [(one, request.answer - 1) for one, request in zip(timings, requests, strict=True)]
            step_s = statistics.median((one.end_s - one.first_s) / gaps for one, gaps in pairs if gaps)
            measured.append((rate, first[0], first[1], step_s))
    rate, p50_s, p99_s, step_s = (statistics.median(ones) for ones in zip(*measured, strict=True))
    path_s = figures()["parts"][FRONTEND]["request_us"] / 1e6
    reckoned = Fleet(count, worker, path_s=path_s).run(requests)
    reckoned_rate = sum(one.done for one in reckoned) / max(one.last_s for one in reckoned)
    first = quantiles([one.first_s - one.at_s for one in reckoned])
    return (
        f"| {count} | {rounds} | {len(requests):,} | {step_s * 1e3:.1f} | {rate:,.0f} | {rate / reckoned_rate:.2f} "
        f"| {p50_s * 1e3:,.0f} | {p50_s / first[0]:.2f} | {p99_s * 1e3:,.0f} | {p99_s / first[1]:.2f} |"
    )


def keep(count: int, line: str) -> None:
    """Write a comparison beside the others."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    kept |= {
        f"{count:02}": line,
        "where": f"{datetime.date.today().isoformat()}, {processor_name()}, {os.cpu_count()} cores",
    }
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    lines = "\n".join(line for key, line in sorted(kept.items()) if key != "where")
    REPORT.write_text(
        f"""# The simulation beside real workers

Made by `.venv/bin/python benchmarks/fleet.py --check 2 4 8 16`: real workers with `--engine constant`, 8 rows and
steps of 50 ms behind Dynamo's frontend, and the simulation, at the same arrivals: {CHECK_RATE:g} requests a second
for each worker, answers of 32 tokens on the mean. Medians of the rounds.

{CHECKED}
{lines}

{kept["where"]} for client, frontend and workers.
""",
        encoding="utf-8",
    )


CHECKED = """| workers | rounds | requests | between tokens, ms | tokens/s | measured / reckoned | first token p50, ms \
| measured / reckoned | p99, ms | measured / reckoned |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # within no bounds


def main() -> None:
    parser = argparse.ArgumentParser(description="Reckon what a fleet needs, and what becomes of its requests.")
    parser.add_argument("--requests-per-minute", type=_positive, default=10_000)
    parser.add_argument("--prompt", type=_count, default=512, help="mean tokens of a prompt")
    parser.add_argument("--answer", type=_count, default=ANSWER, help="mean tokens of an answer")
    parser.add_argument("--seconds", type=_positive, default=60, help="simulated time")
    parser.add_argument("--workers", type=_count, help="default: as many as the mean load needs")
    parser.add_argument("--step-s", type=_positive, default=0.02, help="seconds of a worker's step")
    parser.add_argument("--slots", type=_count, default=64, help="rows of a worker's batch")
    parser.add_argument("--kill", type=_share, default=0.0, help="share of the workers that die in the middle")
    parser.add_argument("--shared", type=_share, default=0.0, help="share of a prompt that its group has in common")
    parser.add_argument("--groups", type=_count, default=1000, help="groups of prompts with a common beginning")
    parser.add_argument("--router", choices=(IN_TURN, OF_TWO, BY_PREFIX), default=IN_TURN)
    parser.add_argument("--disaggregate", action="store_true", help="compare with prefill and decode workers apart")
    parser.add_argument("--handoff-us", type=_positive, default=12, help="microseconds that a token's KV takes")
    parser.add_argument("--check", type=_count, nargs="+", metavar="WORKERS", help="compare with real workers")
    parser.add_argument("--no-write", action="store_true", help="leave results/fleet.* as they are")
    parser.add_argument("--rounds", type=_count, default=3, help="of each comparison")
    options = parser.parse_args()
    end_on_sigterm()
    worker = Worker(step_s=options.step_s, slots=options.slots)
    if options.check:
        print(CHECKED)
        for count in options.check:
            load = Load(rate=CHECK_RATE * count, seconds=CHECK_REQUESTS / CHECK_RATE / count, prompt=1, answer=32)
            line = check(count, Worker(step_s=0.05, slots=8), load, options.rounds)
            print(line, flush=True)
            if not options.no_write:
                keep(count, line)
        return
    load = Load(
        options.requests_per_minute / 60,
        options.seconds,
        options.prompt,
        options.answer,
        options.shared,
        options.groups,
    )
    count = options.workers or needed(load, worker)
    if math.ceil(options.kill * count) >= count:
        parser.error(f"argument --kill: none of {count:,} workers would be left")
    if options.disaggregate and count < 2:
        parser.error("argument --disaggregate: expected at least 2 workers, got 1")
    numbers = ", ".join(f"{number:,} {part}" for part, number in plan(load, worker).items())
    print(f"{load.rate:,.0f} requests/s: {numbers}")
    for router in (OF_TWO, BY_PREFIX) if options.shared else (options.router,):
        fleet = Fleet(count, worker, router, options.shared)
        answered = fleet.run(list(load.requests(3)), options.kill, options.seconds / 2)
        print(f"{count:,} workers, {router}: {summary(answered, options.seconds)}", flush=True)
    if options.disaggregate:
        prompts_s = load.prompt / worker.prompt_rate
        share = prompts_s / (prompts_s + load.answer * worker.step_s / worker.slots)
        for prefill in sorted({max(1, min(count - 1, round(count * share * more))) for more in (0.9, 1.0, 1.1, 1.25)}):
            requests = list(load.requests(3))
            answered = disaggregated(requests, prefill, count - prefill, worker, options.handoff_us / 1e6)
            print(f"{prefill} prefill, {count - prefill} decode: {summary(answered, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
