"""The embedded engine under changing load, as it is served, with the model of `decode.py`.

    .venv/bin/python benchmarks/load.py
    .venv/bin/python benchmarks/load.py --parts prefix gap8

Prints, and writes `results/load.md` from what this and earlier runs kept in `results/load.json`: a
run replaces the parts that it measures.

- ``arrivals``: requests of mixed lengths arrive at random (Poisson), somewhat faster than they can
  be answered. Their throughput, from the time when the batch is full until the last one arrives,
  against that of static batches of as many equally long requests, before and after: the engine's
  best case. Both count the tokens that were computed, prompt and answer, of which the load has as
  many. The round with the median ratio counts.
- ``gap8``, ``gap31``: while 8 or 31 rows decode, a prompt of 2048 tokens comes. The times between
  two tokens of a row until that prompt's first token, against the median time after it, which is a
  step. The median round counts here, too.
- ``prefix``: time to first token of a prompt of 1024 tokens and a few more, and of a second one
  that begins with the same 1024.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint import write_checkpoint
from machine import processor_name
from workload import VOCABULARY

from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.host.own_thread import in_own_thread
from worker.sampling import SamplingParams

HERE = Path(__file__).resolve().parent
KEPT, REPORT = HERE / "results" / "load.json", HERE / "results" / "load.md"
SLOTS = 32
LENGTHS = (32, 64, 128, 192, 224)
"""Of prompts and of answers, each equally likely, drawn apart."""
MEAN_LENGTH = sum(LENGTHS) // len(LENGTHS)
OVERLOAD = 1.5
LONG_PROMPT = 2048
PREFIX, TAIL = 1024, 16
THROUGHPUT_TARGET, GAP_TARGET, PREFIX_TARGET = 0.9, 3.0, 5.0


@dataclass(slots=True)
class Client:
    """One request at a time or many; notes when tokens come."""

    engine: EmbeddedEngine
    source: random.Random
    numbers: itertools.count[int]

    def prompt(self, length: int) -> list[int]:
        return [self.source.randrange(VOCABULARY) for _ in range(length)]

    async def ask(
        self, prompt: Sequence[int], new: int, started: asyncio.Semaphore | None = None
    ) -> list[tuple[float, int]]:
        """Times and token counts of the deltas; the first is the request's time, with none.

        `started` is released at the first token.
        """
        times = [(time.perf_counter(), 0)]
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        async for delta in self.engine.generate(EngineRequest(str(next(self.numbers)), prompt, params)):
            if delta.token_ids:
                times.append((time.perf_counter(), len(delta.token_ids)))
                if started is not None and len(times) == 2:
                    started.release()
        if sum(count for _, count in times) != new:
            raise RuntimeError("an answer has another length than was asked for")
        return times


async def static_speed(client: Client) -> float:
    """Requests per second of a full static batch of requests of the mean length."""
    prompts = [client.prompt(MEAN_LENGTH) for _ in range(SLOTS)]
    started = time.perf_counter()
    await asyncio.gather(*(client.ask(prompt, MEAN_LENGTH) for prompt in prompts))
    return SLOTS / (time.perf_counter() - started)


async def measure_arrivals(client: Client, rounds: int, seconds: float) -> dict[str, float]:
    """The round with the median ratio of the load to the batches just before and after it."""
    found = []
    before = await static_speed(client)
    for _ in range(rounds):
        one = await measure_load(client, OVERLOAD * before, seconds)
        after = await static_speed(client)
        static = MEAN_LENGTH * (before + after) / 2
        found.append({"ratio": one["tokens_per_s"] / static, "static_tokens_per_s": static, **one})
        before = after
    return _median(found)


async def measure_load(client: Client, rate: float, seconds: float) -> dict[str, float]:
    """`rate` requests per second arrive for `seconds`."""
    tasks: list[asyncio.Task[list[tuple[float, int]]]] = []
    lengths: list[tuple[int, int]] = []
    full_s = 0.0
    started = due = time.perf_counter()
    while due < started + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        lengths.append((client.source.choice(LENGTHS), client.source.choice(LENGTHS)))
        tasks.append(asyncio.create_task(client.ask(client.prompt(lengths[-1][0]), lengths[-1][1])))
        if not full_s and client.engine.num_unfinished() >= SLOTS:
            full_s = time.perf_counter()
        due += client.source.expovariate(rate)
    ended_s = time.perf_counter()
    if not full_s:
        raise RuntimeError("the slots were never all taken; let it run longer")
    answers = await asyncio.gather(*tasks)
    done = sum(_share(answer, *length, full_s, ended_s) for answer, length in zip(answers, lengths, strict=True))
    gaps = [gap for answer in answers for gap in _gaps(answer, full_s, ended_s)]
    return {
        "requests": len(answers),
        "window_s": ended_s - full_s,
        "tokens_per_s": done / 2 / (ended_s - full_s),
        "gap_p50_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": 1e3 * _p99(gaps),
    }


def _share(answer: list[tuple[float, int]], prompt: int, new: int, begin_s: float, end_s: float) -> float:
    """Computed tokens of a request in a window; all of its prompt if its first token is in it."""
    generated = sum(count for at, count in answer[1:] if begin_s <= at < end_s)
    return generated + (prompt if begin_s <= answer[1][0] < end_s else 0)


def _gaps(answer: list[tuple[float, int]], begin_s: float, end_s: float) -> list[float]:
    """Times between tokens, of those that came in a window."""
    return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(answer[1:]) if begin_s <= later < end_s]


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def measure_gap(client: Client, rounds: int, rows: int) -> dict[str, float]:
    """The round with the median ratio."""
    return _median([await measure_long_prompt(client, rows) for _ in range(rounds)])


async def measure_long_prompt(client: Client, rows: int) -> dict[str, float]:
    started = asyncio.Semaphore(0)
    running = [asyncio.create_task(client.ask(client.prompt(64), 256, started)) for _ in range(rows)]
    for _ in running:  # their own prompts are not what is measured
        await started.acquire()
    await asyncio.sleep(0.2)
    times = await client.ask(client.prompt(LONG_PROMPT), 1)
    answers = await asyncio.gather(*running)
    began, first = times[0][0], times[1][0]
    gaps = [gap for answer in answers for gap in _gaps(answer, began, first)]
    # after the prompt, so that all of them have been decoding for a while
    step = statistics.median(gap for answer in answers for gap in _gaps(answer, first + 0.1, first + 10.0))
    return {
        "ratio": _p99(gaps) / step,
        "step_ms": 1e3 * step,
        "gap_p50_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": 1e3 * _p99(gaps),
        "first_token_ms": 1e3 * (first - began),
    }


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return sorted(found, key=lambda each: each["ratio"])[len(found) // 2]


async def measure_prefix(client: Client, rounds: int) -> dict[str, float]:
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        prefix = client.prompt(PREFIX)
        for found in (cold, warm):
            times = await client.ask([*prefix, *client.prompt(TAIL)], 1)
            found.append(times[1][0] - times[0][0])
    first, second = statistics.median(cold), statistics.median(warm)
    return {"ratio": first / second, "first_ms": 1e3 * first, "second_ms": 1e3 * second}


Part = Callable[[Client, argparse.Namespace], Awaitable[dict[str, float]]]
PARTS: dict[str, Part] = {
    "gap8": lambda client, arguments: measure_gap(client, arguments.rounds, 8),
    "gap31": lambda client, arguments: measure_gap(client, arguments.rounds, 31),
    "prefix": lambda client, arguments: measure_prefix(client, arguments.rounds),
    "arrivals": lambda client, arguments: measure_arrivals(client, arguments.rounds, arguments.seconds),
}


def render(kept: dict[str, Any]) -> str:
    """`results/load.md`."""
    lines = [
        "# Under load",
        "",
        "Made by `.venv/bin/python benchmarks/load.py`, which says what is measured.",
        "",
        "| part | ratio | aimed at | figures | on | load before |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in PARTS:
        if name in kept:
            one = kept[name]
            aim, text = _DESCRIPTIONS[name](one["figures"])
            lines.append(
                f"| {name} | {one['figures']['ratio']:.2f} | {aim} | {text} | {one['date']}, {one['machine']} "
                f"| {one['load']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def _describe_arrivals(found: dict[str, float]) -> tuple[str, str]:
    return f">= {THROUGHPUT_TARGET}", (
        f"{found['tokens_per_s']:.0f} new tokens/s with as many prompt tokens, against "
        f"{found['static_tokens_per_s']:.0f} of static batches of {SLOTS}; {found['requests']:.0f} requests, "
        f"window {found['window_s']:.0f} s; between tokens p50 {found['gap_p50_ms']:.0f} ms, "
        f"p99 {found['gap_p99_ms']:.0f} ms"
    )


def _describe_gap(found: dict[str, float]) -> tuple[str, str]:
    return f"<= {GAP_TARGET:.0f}", (
        f"step {found['step_ms']:.1f} ms; while the prompt of {LONG_PROMPT} is computed p50 {found['gap_p50_ms']:.1f}, "
        f"p99 {found['gap_p99_ms']:.1f} ms; its first token after {found['first_token_ms']:.0f} ms"
    )


def _describe_prefix(found: dict[str, float]) -> tuple[str, str]:
    return f">= {PREFIX_TARGET:.0f}", (
        f"first token after {found['first_ms']:.0f} ms, and {found['second_ms']:.0f} ms with {PREFIX} tokens known"
    )


_DESCRIPTIONS = {
    "arrivals": _describe_arrivals,
    "gap8": _describe_gap,
    "gap31": _describe_gap,
    "prefix": _describe_prefix,
}


async def run(path: Path, arguments: argparse.Namespace) -> None:
    machine = f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}"
    load = os.getloadavg()[0]
    plain = {"method": "none"}  # the random model repeats itself, and a step is to give a token
    config = EmbeddedConfig(model_path=path, device="cpu", max_num_seqs=SLOTS, max_queue=4096, speculative_config=plain)
    engine = EmbeddedEngine(config)
    await engine.start()
    client = Client(engine, random.Random(0), itertools.count())
    await asyncio.gather(*(client.ask(client.prompt(40), 8) for _ in range(SLOTS)))  # a first turn does not count
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    today = str(datetime.datetime.now(tz=datetime.UTC).date())
    for name in arguments.parts:
        figures = await PARTS[name](client, arguments)
        print(name, json.dumps({key: round(value, 2) for key, value in figures.items()}), flush=True)
        kept[name] = {"date": today, "machine": machine, "load": load, "figures": figures}
        if not arguments.no_results:
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            REPORT.write_text(render(kept), encoding="utf-8")
    await engine.stop()
    print(render(kept))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long requests arrive, each round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        in_own_thread(lambda: write_checkpoint(Path(directory)))
        asyncio.run(run(Path(directory), arguments))


if __name__ == "__main__":
    main()
