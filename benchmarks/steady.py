"""The time between tokens under an hour of steady load, as a client of the default launch sees it.

    .venv/bin/python benchmarks/steady.py                # an hour
    .venv/bin/python benchmarks/steady.py --minutes 2 --no-results

Starts `launch/agg.sh` with its default model, sends chats at random times (Poisson) through its
front door, and notes when each event of a stream comes. A time between tokens is that between two
events of one answer; with speculation an event may have several tokens, and counts once. Garbage
collection, prompts of new requests, frontend, front door and this client are part of it: they share
the machine. The target is a p99.9 of at most 3 times the median. Prints, and writes
`results/steady.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import json
import os
import pydoc_data.topics
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from open_loop import due_times, quantiles
from serve import _free_port, await_models, processor
from workload import HERE

REPORT = HERE / "results" / "steady.md"
MODEL = "SmolLM2-135M-Instruct"
PARTS = 6
TARGET = 3.0
PROMPT_CHARACTERS = (200, 2000)
ANSWER_TOKENS = (32, 256)


@dataclass(slots=True)
class Found:
    """What streams noted.

    Attributes:
        gaps: When a time between events ended, in seconds since the load began, and its length.
        first_s: Seconds from asking to the first event.
        failures: What went wrong with requests.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def ask(port: int, text: str, tokens: int, found: Found, begun: float) -> None:
    """One streamed chat of exactly so many tokens."""
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
    asked, before, tail = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        while data := await reader.read(1 << 16):
            now = time.perf_counter()
            if b'"content":' in data:
                if before:
                    found.gaps.append((now - begun, now - before))
                else:
                    found.first_s.append(now - asked)
                before = now
            tail = (tail + data)[-2000:]
    finally:
        writer.close()
    if b"[DONE]" not in tail:
        found.failures.append(repr(tail[-200:]))


async def load(port: int, rate: float, seconds: float) -> Found:
    """Requests at `rate` a second."""
    found, source = Found(), random.Random(1)
    text = "".join(pydoc_data.topics.topics.values())
    gc.collect()
    gc.disable()  # of this process alone, which is no part of what is served
    begun = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    for at_s in due_times(rate, seconds):
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - begun)))
        start, length = source.randrange(len(text) - PROMPT_CHARACTERS[1]), source.randrange(*PROMPT_CHARACTERS)
        request = ask(port, text[start : start + length], source.randrange(*ANSWER_TOKENS), found, begun)
        tasks = {each for each in tasks if not each.done()} | {asyncio.create_task(request)}
    await asyncio.gather(*tasks)
    return found


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


def render(found: Found, arguments: argparse.Namespace, memory: tuple[int, int]) -> str:
    """`results/steady.md`."""
    seconds = 60 * arguments.minutes
    today = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [
        "# Time between tokens under steady load",
        "",
        "Made by `.venv/bin/python benchmarks/steady.py`, which says what is measured, on",
        f"{today}: {arguments.minutes:g} minutes at {arguments.rate:g} requests a second,",
        f"{len(found.first_s)} answers, {len(found.failures)} failed, {len(found.gaps):,} times;",
        f"{processor()}, {os.cpu_count()} processors.",
        "",
        "| minutes | times | median, ms | p99, ms | p99.9, ms | largest, ms | p99.9 / median |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part in range(PARTS + 1):
        begin, end = (part * seconds / PARTS, (part + 1) * seconds / PARTS) if part < PARTS else (0.0, float("inf"))
        gaps = [1e3 * gap for at_s, gap in found.gaps if begin <= at_s < end]
        p50, p99, p999 = quantiles(gaps)
        name = f"{begin / 60:.0f} to {end / 60:.0f}" if part < PARTS else "all"
        times = f"{p50:.1f} | {p99:.1f} | {p999:.1f} | {max(gaps):.0f}"
        lines.append(f"| {name} | {len(gaps):,} | {times} | {p999 / p50:.2f} |")
    first = quantiles([1e3 * each for each in found.first_s])
    lines += [
        "",
        f"First tokens: median {first[0]:.0f} ms, p99 {first[1]:.0f} ms. The worker's memory: "
        f"{memory[0] >> 20} MiB after the first minute's requests, {memory[1] >> 20} MiB at the end.",
        f"The target for p99.9 is {TARGET:.0f} times the median.",
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
    with tempfile.TemporaryDirectory() as directory, launched(Path(directory)) as (port, worker):
        asyncio.run(load(port, arguments.rate, min(60, 30 * arguments.minutes)))  # what is first is not steady
        before = worker.memory_info().rss
        found = asyncio.run(load(port, arguments.rate, 60 * arguments.minutes))
        memory = before, worker.memory_info().rss
    report = render(found, arguments, memory)
    print(report)
    for failure in found.failures:
        print(f"failed: {failure}")
    if not arguments.no_results:
        REPORT.write_text(report, encoding="utf-8")
    if found.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
