"""Requests that come at random whether or not those before them are answered.

A client that waits for an answer before it asks again slows down with the server, and hides how
long others would have waited (coordinated omission). Here each request is due at a time that was
drawn before; its latency counts from then on, also where this process sends it late.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 15.0
"""Seconds after the last arrival until requests count as not answered."""

Ask = Callable[[Callable[[], None]], Awaitable[object]]
"""Sends one request, calls its argument at the first token, and returns at the last one."""


@dataclass(slots=True)
class Timing:
    """Seconds since the load began: when a request was due, its first token, its end; infinite
    where that did not come.
    """

    due_s: float
    first_s: float = math.inf
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a load.

    Attributes:
        rate: Requests that came in a second, on the mean.
        answered: Share of them that were answered.
        first_ms: Milliseconds from due to first token: p50, p99, p99.9.
        end_ms: Milliseconds from due to the end: p50, p99, p99.9.
        finished: Requests that ended in a second, until the last one did.
    """

    rate: float
    answered: float
    first_ms: tuple[float, ...]
    end_ms: tuple[float, ...]
    finished: float


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """p50, p99 and p99.9."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 0.999))


def due_times(rate: float, seconds: float, seed: int = 1) -> list[float]:
    """Poisson arrivals: seconds since the load began."""
    source = random.Random(seed)
    times: list[float] = []
    at_s = source.expovariate(rate)
    while at_s < seconds:
        times.append(at_s)
        at_s += source.expovariate(rate)
    return times


async def drive(due: Sequence[float], asks: Sequence[Ask] | Ask) -> list[Timing]:
    """Send a request at each of the times; `asks` is one way to ask for all, or one for each."""
    timings = [Timing(at_s) for at_s in due]
    gc.collect()
    gc.disable()  # a collection would delay whatever comes meanwhile
    begun = time.perf_counter()

    async def one(timing: Timing, ask: Ask) -> None:
        def first() -> None:
            timing.first_s = time.perf_counter() - begun

        try:
            await ask(first)
        except (OSError, RuntimeError):
            timing.first_s = math.inf  # it has no answer
        else:
            timing.end_s = time.perf_counter() - begun

    tasks = []
    for number, timing in enumerate(timings):
        wait_s = timing.due_s - (time.perf_counter() - begun)
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(timing, asks if callable(asks) else asks[number])))
    _, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gc.enable()
    return timings


def outcome(timings: Sequence[Timing], seconds: float) -> Outcome:
    """The figures of a load that came within `seconds`; what was not answered waits infinitely."""
    ended = [one.end_s for one in timings if one.end_s < math.inf]
    first, end = (
        [(value - one.due_s) * 1e3 for one, value in pairs]
        for pairs in ([(one, one.first_s) for one in timings], [(one, one.end_s) for one in timings])
    )
    return Outcome(
        len(timings) / seconds,
        len(ended) / len(timings),
        quantiles(first),
        quantiles(end),
        len(ended) / max(seconds, *ended, 0.0),
    )


def shown(values: Sequence[float]) -> str:
    """p50 / p99 / p99.9 of a table."""
    return " / ".join("none" if value == math.inf else f"{value:,.{1 if value < 10 else 0}f}" for value in values)


BENT_MS = 100.0
"""A part bends where one request of a hundred waits longer than this for its first token."""


def bends(found: Outcome) -> bool:
    return found.first_ms[1] > BENT_MS or found.answered < 1


def climb(load: Callable[[float], Outcome], start: float, factor: float = 1.5, most: int = 12) -> list[Outcome]:
    """The outcomes of ever higher rates, up to the first that bends the part."""
    found: list[Outcome] = []
    while len(found) < most and not (found and bends(found[-1])):
        found.append(load(start * factor ** len(found)))
    return found


def limit(found: Sequence[Outcome]) -> Outcome:
    """The highest rate that did not bend the part; the lowest one if all did."""
    return next((one for one in reversed(found) if not bends(one)), found[0])


def keep(path: Path, key: str, row: Any) -> dict[str, dict[str, Any]]:
    """Keep a row of a benchmark, a dataclass, as JSON; returns all rows that are kept, by key."""
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = dict(sorted({**kept, key: dataclasses.asdict(row)}.items()))
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept
