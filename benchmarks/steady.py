"""The time between tokens under an hour of steady load, as a client of the default launch sees it.

    .venv/bin/python benchmarks/steady.py                # an hour
    .venv/bin/python benchmarks/steady.py --minutes 2 --no-results

Starts `launch/agg.sh` with its default model, sends chats at random times (Poisson) through its
front door, and notes when each event of a stream comes. A time between tokens is that between two
events of one answer; with speculation an event may have several tokens, and counts once. Garbage
collection, prompts of new requests, frontend, front door and this client are part of it: they share
the machine. The target is a p99.9 of at most 3 times the median. Prints, and writes
`results/steady.md`.

A virtual machine is held up by its host, for tens of milliseconds at a time: before and behind the
load, loops of as long as the median of times between tokens run on each processor, with nothing
beside them. A step waits for both processors, so what the slowest of a thousand loops takes is less
than what the slowest of a thousand steps takes of any engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import pydoc_data.topics
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from machine import processor_name
from open_loop import Ask, Outcome, Timing, drive, due_times, outcome, quantiles
from serve import _free_port, await_models, end_on_sigterm
from workload import HERE

REPORT = HERE / "results" / "steady.md"
MODEL = "SmolLM2-135M-Instruct"
PARTS = 6
TARGET = 3.0
ALONE_S = 30.0
"""Seconds of the loops before the load, and behind it."""
PROMPT_CHARACTERS = (200, 2000)
ANSWER_TOKENS = (32, 256)


Gaps = list[tuple[float, float]]
"""When a time between events ended, in seconds of `time.perf_counter`, and its length."""


async def ask(port: int, text: str, tokens: int, gaps: Gaps, first: Callable[[], None]) -> None:
    """One streamed chat of exactly so many tokens; raises `RuntimeError` if it does not end."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    before, tail = 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        while data := await reader.read(1 << 16):
            if b'"content":' in data:
                now = time.perf_counter()
                if before:
                    gaps.append((now, now - before))
                else:
                    first()
                before = now
            tail = (tail + data)[-2000:]
    finally:
        writer.close()
    if b"[DONE]" not in tail:
        raise RuntimeError(f"the stream was cut behind {tail[-200:]!r}")


def load(port: int, rate: float, seconds: float) -> tuple[list[Timing], Gaps]:
    """Requests at `rate` a second."""
    gaps: Gaps = []
    source = random.Random(1)
    text = "".join(pydoc_data.topics.topics.values())
    due = due_times(rate, seconds)
    asks: list[Ask] = []
    for _ in due:
        start, length = source.randrange(len(text) - PROMPT_CHARACTERS[1]), source.randrange(*PROMPT_CHARACTERS)
        asks.append(partial(ask, port, text[start : start + length], source.randrange(*ANSWER_TOKENS), gaps))
    begun = time.perf_counter()
    timings = asyncio.run(drive(due, asks))
    return timings, [(at_s - begun, gap) for at_s, gap in gaps]


@contextlib.contextmanager
def launched(directory: Path) -> Iterator[tuple[int, psutil.Process]]:
    """The launch script's port and its worker."""
    port = _free_port()
    environ = os.environ | {"HTTP_PORT": str(port), "FRONT_DOOR_BATCH_DIR": "off", "TMPDIR": str(directory)}
    script = subprocess.Popen([str(HERE.parent / "launch" / "agg.sh")], env=environ)
    try:
        await_models(port, {MODEL}, [script])
        children = psutil.Process(script.pid).children(recursive=True)
        yield port, next(each for each in children if each.cmdline()[1:3] == ["-m", "worker"])
    finally:
        script.send_signal(signal.SIGTERM)
        script.wait(120)


def _loop(count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        pass
    return time.perf_counter() - begun


def loops(length_s: float, seconds: float) -> list[float]:
    """Milliseconds that loops of about `length_s` take, one after the other, on this processor."""
    count = int(length_s * 1_000_000 / min(_loop(1_000_000) for _ in range(20)))
    return [1e3 * _loop(count) for _ in range(int(seconds / length_s))]


def machine_alone(length_s: float) -> list[float]:
    """`loops` of all processors at once."""
    count = os.cpu_count() or 1
    with ProcessPoolExecutor(count) as pool:
        found = pool.map(loops, [length_s] * count, [ALONE_S] * count)
        return [one_ms for of_one in found for one_ms in of_one]


def render(
    found: Outcome, gaps: Gaps, alone_ms: list[float], arguments: argparse.Namespace, memory: tuple[int, int]
) -> str:
    """`results/steady.md`."""
    seconds = 60 * arguments.minutes
    today = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [
        "# Time between tokens under steady load",
        "",
        "Made by `.venv/bin/python benchmarks/steady.py`, which says what is measured, on",
        f"{today}: {arguments.minutes:g} minutes at {arguments.rate:g} requests a second,",
        f"{100 * found.answered:g} % of them answered, {len(gaps):,} times;",
        f"{processor_name()}, {os.cpu_count()} processors.",
        "",
        "| minutes | times | median, ms | p99, ms | p99.9, ms | largest, ms | p99.9 / median |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part in range(PARTS + 1):
        begin, end = (part * seconds / PARTS, (part + 1) * seconds / PARTS) if part < PARTS else (0.0, float("inf"))
        part_ms = [1e3 * gap for at_s, gap in gaps if begin <= at_s < end]
        p50, p99, p999 = quantiles(part_ms)
        name = f"{begin / 60:.0f} to {end / 60:.0f}" if part < PARTS else "all"
        times = f"{p50:.1f} | {p99:.1f} | {p999:.1f} | {max(part_ms):.0f}"
        lines.append(f"| {name} | {len(part_ms):,} | {times} | {p999 / p50:.2f} |")
    p50, p99, p999 = quantiles(alone_ms)
    times = f"{p50:.1f} | {p99:.1f} | {p999:.1f} | {max(alone_ms):.0f}"
    lines += [
        f"| loops, with nothing beside them | {len(alone_ms):,} | {times} | {p999 / p50:.2f} |",
        "",
        f"First tokens: median {found.first_ms[0]:.0f} ms, p99 {found.first_ms[1]:.0f} ms. The worker's memory: "
        f"{memory[0] >> 20} MiB after the first minute's requests, {memory[1] >> 20} MiB at the end, of which the KV "
        "cache, taken as prompts and answers fill it, is up to 4 GiB.",
        f"The target for p99.9 is {TARGET:.0f} times the median. Loops are as long as a step, on each processor alone,",
        "before and behind the load: the machine holds them up, as it does any program.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, on the mean")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as directory, launched(Path(directory)) as (port, worker):
        _, warm = load(port, arguments.rate, min(60, 30 * arguments.minutes))  # what is first is not steady
        before = worker.memory_info().rss
        length_s = median(gap for _, gap in warm)
        alone_ms = machine_alone(length_s)
        timings, gaps = load(port, arguments.rate, 60 * arguments.minutes)
        memory = before, worker.memory_info().rss
        alone_ms += machine_alone(length_s)
    found = outcome(timings, 60 * arguments.minutes)
    report = render(found, gaps, alone_ms, arguments, memory)
    print(report)
    if not arguments.no_results:
        REPORT.write_text(report, encoding="utf-8")
    if found.answered < 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
