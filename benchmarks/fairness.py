"""The first token of a small client while another client keeps the worker full, against its first
token alone.

    .venv/bin/python benchmarks/fairness.py

Starts a frontend, a worker with the model of `decode.py` and a front door with two API keys. The
small client sends one request at a time; the large one keeps 64 going, each with another prompt.
The small client's prompts are new each time, too. The target is a p99 of at most 3 times the one
alone. `results/fairness.md` keeps the last table, with the same of a worker that takes both for one
client, as it does where a request says nothing of its client; that one is of 6 requests.

Client, frontend, front door and worker share the machine: read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from checkpoint import write_checkpoint
from machine import processor_name
from serve import _free_port, end, end_on_sigterm, environment

from worker.tiny_model import write_tiny_model

HERE = Path(__file__).resolve().parent
REPORT = HERE / "results" / "fairness.md"
MODEL, KEYS = "fairness", ("small", "large")
VOCABULARY, SMALLEST_ID = 32_000, 1_000
START_TIMEOUT_S, TARGET = 180, 3.0
FEW = 6
"""Requests of the small client as one client with the other: each waits for all of that one's."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of the clients.

    Attributes:
        num_small: Requests of the small client, one after the other.
        small_prompt: Their tokens.
        num_large: Requests of the large client at a time.
        large_prompt: Their tokens, at least and at most.
        large_answer: Tokens of each answer.
    """

    num_small: int
    small_prompt: int
    num_large: int
    large_prompt: tuple[int, int] = (64, 512)
    large_answer: int = 64


@dataclass(slots=True)
class Client:
    """One client.

    Attributes:
        port: Of the front door.
        key: Its API key.
        source: Of its prompts.
        num_tokens: Tokens of its answers so far.
    """

    port: int
    key: str
    source: random.Random
    num_tokens: int = field(default=0)

    async def ask(self, prompt: int, answer: int) -> float:
        """Seconds until the first token of an answer; returns when it has ended."""
        ids = [self.source.randrange(SMALLEST_ID, VOCABULARY) for _ in range(prompt)]
        fields = {"model": MODEL, "prompt": ids, "max_tokens": answer, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self.key}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            started = time.perf_counter()
            writer.write(head.encode() + body)
            received = b""
            while b"data: " not in received:
                received += await _some(reader)
            first_s = time.perf_counter() - started
            while b"[DONE]" not in received:
                received = received[-2000:] + await _some(reader)
        finally:
            writer.close()
        if b'"error"' in received:
            raise RuntimeError(received.decode(errors="replace"))
        self.num_tokens += prompt + answer
        return first_s


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(1 << 16)
    if not data:
        raise RuntimeError("the stream was cut")
    return data


@dataclass(frozen=True, slots=True)
class Found:
    """First tokens of the small client in seconds, and tokens per second of both clients, prompts
    and answers.
    """

    first_s: list[float]
    small_per_s: float
    large_per_s: float

    @property
    def p99_s(self) -> float:
        return sorted(self.first_s)[min(len(self.first_s) - 1, int(0.99 * len(self.first_s)))]

    @property
    def p50_s(self) -> float:
        return statistics.median(self.first_s)


async def measure(port: int, load: Load, keys: Sequence[str], num_large: int, num_small: int) -> Found:
    """So many requests of the small client beside so many of the large one."""
    small, large = (Client(port, key, random.Random(str(number))) for number, key in enumerate(keys))
    if num_large == 0:
        await small.ask(load.small_prompt, 1)  # warm-up

    async def keep_going() -> None:
        while True:
            await large.ask(large.source.randint(*load.large_prompt), load.large_answer)

    tasks = [asyncio.create_task(keep_going()) for _ in range(num_large)]
    await asyncio.sleep(3 if tasks else 0)  # until the batch is full
    started, before = time.perf_counter(), (small.num_tokens, large.num_tokens)
    first_s = []
    for _ in range(num_small):
        await asyncio.sleep(small.source.uniform(0, 0.2))
        first_s.append(await small.ask(load.small_prompt, 1))
    elapsed_s = time.perf_counter() - started
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return Found(first_s, (small.num_tokens - before[0]) / elapsed_s, (large.num_tokens - before[1]) / elapsed_s)


async def measure_all(port: int, load: Load) -> list[str]:
    alone = await measure(port, load, KEYS, 0, load.num_small)
    rows = [row("alone", alone, alone)]
    print(rows[-1], flush=True)
    ways = {"beside the other": (KEYS, load.num_small), "as one client with it": ((KEYS[1], KEYS[1]), FEW)}
    for name, (keys, num_small) in ways.items():
        found = await measure(port, load, keys, load.num_large, num_small)
        rows.append(row(name, found, alone))
        print(rows[-1], flush=True)
        await asyncio.sleep(1)
    return rows


TABLE_HEAD = (
    "| small client | first token, p50 ms | p99 ms | p99, times alone | tokens/s, small client | large client |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def row(name: str, found: Found, alone: Found) -> str:
    return (
        f"| {name} | {found.p50_s * 1e3:.0f} | {found.p99_s * 1e3:.0f} | {found.p99_s / alone.p99_s:.1f} "
        f"| {found.small_per_s:,.0f} | {found.large_per_s:,.0f} |"
    )


def report(rows: Sequence[str], load: Load) -> str:
    low, high = load.large_prompt
    return f"""# The first token beside a client that keeps the worker full

Made by `.venv/bin/python benchmarks/fairness.py`, which says what is measured: {load.num_small} requests of the small
client with {load.small_prompt} tokens each, one at a time; {load.num_large} of the large one at a time, prompts of
{low} to {high} tokens, answers of {load.large_answer}. The target is {TARGET:g} times the p99 alone.

{TABLE_HEAD}
{chr(10).join(rows)}

{datetime.date.today().isoformat()}, {processor_name()}, {os.cpu_count()} cores for clients, frontend,
front door and worker; load average {os.getloadavg()[1]:.1f}; Python {platform.python_version()}.
"""


@contextlib.contextmanager
def serving(directory: Path, arguments: Sequence[str]) -> Iterator[int]:
    """The port of a front door before a frontend and a worker on loopback."""
    model, ports = write_tiny_model(directory / "model"), (_free_port(), _free_port())
    write_checkpoint(model, VOCABULARY)
    (directory / "keys").write_text("\n".join(KEYS))
    environ = environment(directory) | {"DYN_LOG": "off", "HOME": str(directory), "TMPDIR": str(directory)}
    upstream = f"http://127.0.0.1:{ports[0]}"
    commands = [
        ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(ports[0])],
        ["-m", "worker.frontdoor", "--port", str(ports[1]), "--upstream", upstream, f"--api-key-file={directory}/keys"],
        ["-m", "worker", "--model-path", str(model), "--served-model-name", MODEL, "--device", "cpu", *arguments],
    ]
    processes = [subprocess.Popen([sys.executable, *command], env=environ) for command in commands]
    try:
        _await_model(ports[0], processes)
        yield ports[1]
    finally:
        end(reversed(processes))  # the frontend last


def _await_model(port: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("fairness: a process did not start")
        time.sleep(0.5)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response,
        ):
            if json.load(response)["data"]:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description="The first token of a small client beside a large one.")
    parser.add_argument("--requests", type=int, default=100, help="of the small client")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the small client's prompts")
    parser.add_argument("--streams", type=int, default=64, help="requests of the large client at a time")
    parser.add_argument("--no-write", action="store_true", help="leave results/fairness.md as it is")
    options, arguments = parser.parse_known_args()  # the rest is the worker's
    end_on_sigterm()
    load = Load(options.requests, options.prompt, options.streams)
    print(TABLE_HEAD, flush=True)
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), arguments) as port:
        rows = uvloop.run(measure_all(port, load))
    if not options.no_write:
        REPORT.write_text(report(rows, load), encoding="utf-8")
        print(f"\nwritten to {REPORT.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
