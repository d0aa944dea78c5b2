"""A fleet that is reckoned: a discrete-event simulation of workers behind doors and frontends.

    .venv/bin/python benchmarks/fleet.py --requests-per-minute 10000
    .venv/bin/python benchmarks/fleet.py --requests-per-minute 1000000 --workers 4000 --kill 0.01
    .venv/bin/python benchmarks/fleet.py --check 2 4

A worker is its batch: a step takes `step_s` and a share of `prompt_rate` for the prompts' tokens in
it, as ``--engine constant`` does; requests wait for one of `slots` rows, and prompts for the token
budget of a step. Each request goes to the worker with the fewest unfinished ones of two that are
drawn (the power of two choices), or, with ``--shared`` and the KV router, to the one that has its
prefix. What front doors and frontends take comes from `results/parts.json` (`parts.py`): their
number keeps each at `USE` of its cores. A killed worker's requests go on elsewhere: prompt and
answer so far are computed again there, as exact migration does.

Prints throughput, time to first token and longest gap between two tokens (p50, p99, p99.9).
``--check`` drives real workers with ``--engine constant`` behind Dynamo's frontend with the same
arrivals (open loop: nobody waits for an answer before asking), and prints measured / reckoned.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from parts import ANSWER, DOOR, FRONTEND, MODEL, Stack, running
from serve import HERE, stream_completion

USE = 0.7
"""Share of a core's time that a front door or frontend may be busy with the mean load."""

FRONTEND_CORES = 4


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker can do; seconds, and tokens per second."""

    step_s: float = 0.02
    prompt_rate: float = 10_000
    slots: int = 64
    budget: int = 2048


@dataclass(slots=True)
class Request:
    """One request: when it came, what it has to do, and when its tokens came."""

    at_s: float
    prompt: int
    answer: int
    group: int = -1
    left_to_compute: int = 0
    done: int = 0
    first_s: float = math.inf
    last_s: float = math.inf
    gap_s: float = 0.0


@dataclass(slots=True)
class Batch:
    """A worker's queue and rows."""

    waiting: deque[Request] = field(default_factory=deque)
    rows: list[Request] = field(default_factory=list)
    stepping: bool = False
    alive: bool = True
    prefixes: set[int] = field(default_factory=set)

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.rows)


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals: `rate` a second for `seconds`; `shared` is the part of each prompt that it has in
    common with the others of its group, `groups` their number.
    """

    rate: float
    seconds: float
    prompt: int = 512
    answer: int = ANSWER
    shared: float = 0.0
    groups: int = 1

    def requests(self, seed: int) -> Iterator[Request]:
        """Poisson arrivals; lengths are exponential around their means, from 1 on."""
        source = random.Random(seed)
        at_s = 0.0
        while (at_s := at_s + source.expovariate(self.rate)) < self.seconds:
            prompt, answer = (max(1, round(source.expovariate(1 / mean))) for mean in (self.prompt, self.answer))
            yield Request(at_s, prompt, answer, source.randrange(self.groups) if self.shared else -1)


class Fleet:
    """`count` workers; `run` answers every request of a load.

    Args:
        count: Number of workers.
        worker: Abilities of each.
        shared: Part of a prompt that is cached where another one of its group was computed.
        by_prefix: Whether the router knows where.
        seed: Seed of the choices of workers.
    """

    def __init__(self, count: int, worker: Worker, shared: float = 0.0, by_prefix: bool = False, seed: int = 1) -> None:
        self.batches = [Batch() for _ in range(count)]
        self.worker, self.shared, self.by_prefix = worker, shared, by_prefix
        self._source = random.Random(seed)
        self._events: list[tuple[float, int, int]] = []  # time, order, worker whose step ends
        self._order = 0
        self._alive: Sequence[int] = range(count)

    def run(self, requests: Sequence[Request], kill: float = 0.0, kill_at_s: float = math.inf) -> list[Request]:
        """The requests, answered; the first `kill` of the workers die at `kill_at_s`."""
        for request in requests:
            if kill and request.at_s >= kill_at_s:
                self._until(kill_at_s)
                self._kill(math.ceil(kill * len(self.batches)), kill_at_s)
                kill = 0.0
            self._until(request.at_s)
            self._take(request, request.at_s)
        self._until(math.inf)
        return list(requests)

    def _until(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            at_s, _, index = heapq.heappop(self._events)
            self._end_step(index, at_s)

    def _take(self, request: Request, now_s: float) -> None:
        index = self._choose(request)
        batch = self.batches[index]
        cached = self.shared if request.group in batch.prefixes else 0.0
        request.left_to_compute = max(1, round(request.prompt * (1 - cached))) + request.done
        batch.prefixes.add(request.group)
        batch.waiting.append(request)
        if not batch.stepping:
            self._begin_step(index, now_s)

    def _choose(self, request: Request) -> int:
        found = min(self._source.choices(self._alive, k=2), key=lambda index: self.batches[index].load)
        if self.by_prefix and request.group >= 0:
            home = request.group % len(self.batches)
            if self.batches[home].alive and self.batches[home].load <= 2 * self.batches[found].load + 4:
                return home
        return found

    def _begin_step(self, index: int, now_s: float) -> None:
        batch, worker = self.batches[index], self.worker
        while batch.waiting and len(batch.rows) < worker.slots:
            batch.rows.append(batch.waiting.popleft())
        budget = worker.budget - sum(not row.left_to_compute for row in batch.rows)
        computed = 0
        for row in batch.rows:
            chunk = min(row.left_to_compute, budget - computed)
            row.left_to_compute -= chunk
            computed += chunk
        batch.stepping = True
        self._order += 1
        heapq.heappush(self._events, (now_s + worker.step_s + computed / worker.prompt_rate, self._order, index))

    def _end_step(self, index: int, now_s: float) -> None:
        batch = self.batches[index]
        batch.stepping = False
        if not batch.alive:
            return
        for row in batch.rows:
            if row.left_to_compute:
                continue
            row.done += 1
            if row.first_s == math.inf:
                row.first_s = now_s
            else:
                row.gap_s = max(row.gap_s, now_s - row.last_s)
            row.last_s = now_s
        batch.rows = [row for row in batch.rows if row.done < row.answer]
        if batch.rows or batch.waiting:
            self._begin_step(index, now_s)

    def _kill(self, count: int, now_s: float) -> None:
        """Workers die at once; what they had goes on elsewhere."""
        lost = []
        for batch in self.batches[:count]:
            batch.alive = False
            lost += [*batch.rows, *batch.waiting]
            batch.rows, batch.waiting = [], deque()
        self._alive = range(count, len(self.batches))
        for request in lost:
            self._take(request, now_s)


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """p50, p99 and p99.9."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 0.999))


def summary(requests: Sequence[Request], seconds: float) -> str:
    first = quantiles([one.first_s - one.at_s for one in requests])
    gaps = quantiles([one.gap_s for one in requests])
    rate = sum(one.done for one in requests) / max(seconds, max(one.last_s for one in requests))
    shown = [" / ".join(f"{value * 1e3:,.0f}" for value in values) for values in (first, gaps)]
    return f"{rate:,.0f} tokens/s; first token {shown[0]} ms; longest gap {shown[1]} ms (p50 / p99 / p99.9)"


def needed(load: Load, worker: Worker) -> int:
    """Workers that keep `USE` of their rows busy on the mean."""
    step_s = worker.step_s + worker.slots * (load.prompt / load.answer) / worker.prompt_rate
    return math.ceil(load.rate * (load.answer + 1) * step_s / (worker.slots * USE))


def front(load: Load) -> str:
    """How many front doors and frontends serve the load."""
    path = HERE / "results" / "parts.json"
    costs = json.loads(path.read_text())["costs"]
    busiest = max(one["streams"] for one in costs)
    took = {one["part"]: one for one in costs if one["streams"] == busiest}
    cores = {
        part: load.rate * (took[part]["request_us"] + load.answer * took[part]["token_us"]) / 1e6 / USE
        for part in (DOOR, FRONTEND)
    }
    frontends = math.ceil(cores[FRONTEND] / FRONTEND_CORES)
    return f"{math.ceil(cores[DOOR])} front doors of one core, {frontends} frontends of {FRONTEND_CORES} cores"


async def drive(stack: Stack, requests: Sequence[Request]) -> None:
    """Ask each at its time, and write down when its first and last token came."""
    begun = time.perf_counter()

    async def ask(request: Request) -> None:
        await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - begun)))
        late_s = time.perf_counter() - begun
        request.first_s = late_s + await stream_completion(stack.frontend_port, MODEL, request.answer)
        request.last_s, request.done = time.perf_counter() - begun, request.answer

    await asyncio.gather(*(ask(request) for request in requests))


def check(count: int, worker: Worker, load: Load) -> str:
    """Measured / reckoned: tokens per second, and p99 of the first token."""
    reckoned = Fleet(count, worker).run(list(load.requests(7)))
    measured = list(load.requests(7))
    with (
        tempfile.TemporaryDirectory() as directory,
        running(Path(directory), worker.step_s, worker.slots, count) as stack,
    ):
        uvloop.run(drive(stack, measured[:8]))  # warm-up
        measured = list(load.requests(7))
        uvloop.run(drive(stack, measured))
    rates = [sum(one.done for one in ones) / max(one.last_s for one in ones) for ones in (measured, reckoned)]
    firsts = [quantiles([one.first_s - one.at_s for one in ones])[1] for ones in (measured, reckoned)]
    ratios = [pair[0] / pair[1] for pair in (rates, firsts)]
    return f"| {count} | {rates[0]:,.0f} | {ratios[0]:.2f} | {firsts[0] * 1e3:,.0f} | {ratios[1]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Reckon what a fleet needs, and what becomes of its requests.")
    parser.add_argument("--requests-per-minute", type=float, default=10_000)
    parser.add_argument("--prompt", type=int, default=512, help="mean tokens of a prompt")
    parser.add_argument("--answer", type=int, default=ANSWER, help="mean tokens of an answer")
    parser.add_argument("--seconds", type=float, default=60, help="simulated time")
    parser.add_argument("--workers", type=int, help="default: as many as the mean load needs")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds of a worker's step")
    parser.add_argument("--slots", type=int, default=64, help="rows of a worker's batch")
    parser.add_argument("--kill", type=float, default=0.0, help="share of the workers that die in the middle")
    parser.add_argument("--shared", type=float, default=0.0, help="share of a prompt that its group has in common")
    parser.add_argument("--groups", type=int, default=1000, help="groups of prompts with a common beginning")
    parser.add_argument("--check", type=int, nargs="+", metavar="WORKERS", help="compare with real workers")
    options = parser.parse_args()
    worker = Worker(step_s=options.step_s, slots=options.slots)
    if options.check:
        print("| workers | tokens/s | measured / reckoned | first token p99, ms | measured / reckoned |")
        print("| --- | --- | --- | --- | --- |")
        for count in options.check:
            load = Load(rate=2.0 * count, seconds=20, prompt=1, answer=64)
            print(check(count, Worker(step_s=0.05, slots=16), load), flush=True)
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
    print(f"{load.rate:,.0f} requests/s: {count:,} workers, {front(load)}")
    for by_prefix in (False, True) if options.shared else (False,):
        fleet = Fleet(count, worker, options.shared, by_prefix)
        answered = fleet.run(list(load.requests(3)), options.kill, options.seconds / 2)
        name = "with the KV router: " if by_prefix else ""
        print(f"{name}{summary(answered, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
