"""Serving overhead: the worker with a free model against the smallest engine that Dynamo accepts,
and through the front door against Dynamo's frontend alone.

    .venv/bin/python benchmarks/serve.py

Starts one frontend, a front door before it and both workers, drives them in turn with 1, 16 and 64
streams, and prints a table of medians; `results/serve.md` keeps the last one. Ratios are ours to
the constant engine's, above 1 is better for ours: tokens per second as ours / constant, time to
first token as constant / ours. The target is at least 0.8 for each. Through the front door our
worker is to give at least 0.9 of its tokens per second, and its first token at most 1 ms later.

The client, the frontend, the front door and the workers share the machine: read the ratios.
With either engine, Dynamo's own connections delay the first event of some requests by about 40 ms;
their number varies by round. The time to first token is therefore the median over the requests of
all rounds. All streams start together, and each sends its second request when its first has ended.
Ours generates several times the tokens meanwhile, on the same frontend and client, so that its
first tokens compete with more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from machine import processor_name

from worker.tiny_model import write_tiny_model

HERE = Path(__file__).resolve().parent
OURS, CONSTANT = "ours", "constant"
DOOR = "front door"
"""Our worker again, through the front door."""

START_TIMEOUT_S = 120
TARGET, DOOR_TARGET = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: tokens per second over all streams, and seconds to first token per request."""

    tokens_per_s: float
    ttfts_s: list[float]


async def stream_completion(port: int, model: str, num_tokens: int, first: Callable[[], None] | None = None) -> float:
    """One streamed completion on a connection of its own; the time to its first event, in seconds,
    at which `first` is called.

    Raises `RuntimeError` unless exactly `num_tokens` tokens came.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": "Hello",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        started = time.perf_counter()
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        received = b""
        while b"data: " not in received:
            received += await _some(reader)
        ttft_s = time.perf_counter() - started
        if first is not None:
            first()
        tail = received
        while b"[DONE]" not in tail:
            tail = tail[-2000:] + await _some(reader)
    finally:
        writer.close()
    if f'"completion_tokens":{num_tokens},'.encode() not in tail:
        raise RuntimeError(f"{model}: not {num_tokens} tokens: {tail[-2000:]!r}")
    return ttft_s


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(1 << 16)
    if not data:
        raise RuntimeError("the stream was cut")
    return data


async def drive(port: int, model: str, num_streams: int, num_tokens: int) -> Sample:
    """`num_streams` clients, each with one request after the other."""
    per_stream = max(2, 16 // num_streams)

    async def client() -> list[float]:
        return [await stream_completion(port, model, num_tokens) for _ in range(per_stream)]

    started = time.perf_counter()
    ttfts = await asyncio.gather(*(client() for _ in range(num_streams)))
    duration_s = time.perf_counter() - started
    return Sample(
        tokens_per_s=num_streams * per_stream * num_tokens / duration_s,
        ttfts_s=[ttft for one in ttfts for ttft in one],
    )


@dataclass(frozen=True, slots=True)
class Medians:
    """Tokens per second over rounds, and seconds to first token over all requests and by round."""

    tokens_per_s: float
    ttft_s: float
    ttfts_of_rounds_s: list[float]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Medians:
        return cls(
            statistics.median(one.tokens_per_s for one in samples),
            statistics.median(ttft for one in samples for ttft in one.ttfts_s),
            [statistics.median(one.ttfts_s) for one in samples],
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and its confidence interval of 95 % by order statistics."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        ordered = sorted(values)
        reach = 0.98 * len(ordered) ** 0.5  # 1.96 standard deviations of a binomial with p = 1/2
        low, high = math.floor((len(ordered) - 1) / 2 - reach), math.ceil((len(ordered) - 1) / 2 + reach)
        return cls(statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)])

    def scaled(self, factor: float) -> str:
        return f"{self.median * factor:+.1f} ({self.low * factor:+.1f} to {self.high * factor:+.1f})"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the frontend and the front door serve."""

    frontend: int
    door: int


async def measure(ports: Ports, num_streams: int, num_tokens: int, num_rounds: int) -> dict[str, Medians]:
    """They take turns, and who goes first alternates."""
    ways = {OURS: (ports.frontend, OURS), DOOR: (ports.door, OURS), CONSTANT: (ports.frontend, CONSTANT)}
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    for port, model in ways.values():
        await drive(port, model, num_streams, num_tokens)  # warm-up
    for number in range(num_rounds):
        for way in list(ways) if number % 2 == 0 else reversed(ways):
            port, model = ways[way]
            samples[way].append(await drive(port, model, num_streams, num_tokens))
    return {way: Medians.of(taken) for way, taken in samples.items()}


def row(num_streams: int, medians: dict[str, Medians]) -> str:
    ours, constant, door = medians[OURS], medians[CONSTANT], medians[DOOR]
    later = Estimate.of([b - a for a, b in zip(ours.ttfts_of_rounds_s, door.ttfts_of_rounds_s, strict=True)])
    return (
        f"| {num_streams} | {ours.tokens_per_s:,.0f} | {constant.tokens_per_s:,.0f} "
        f"| {ours.tokens_per_s / constant.tokens_per_s:.2f} "
        f"| {ours.ttft_s * 1e3:.1f} | {constant.ttft_s * 1e3:.1f} | {constant.ttft_s / ours.ttft_s:.2f} "
        f"| {door.tokens_per_s:,.0f} | {door.tokens_per_s / ours.tokens_per_s:.2f} "
        f"| {later.scaled(1e3)} |"
    )


HEAD = (
    "| streams | tokens/s, ours | constant | ratio | first token in ms, ours | constant | ratio "
    "| tokens/s, front door | ratio to ours | first token, ms later |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def report(rows: Sequence[str], num_tokens: int, num_rounds: int) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ai-dynamo", "torch"))
    return f"""# What serving costs besides the model

Made by `.venv/bin/python benchmarks/serve.py`, which says what is compared. Medians of {num_rounds} interleaved rounds
with {num_tokens} tokens per request, of the first token over all requests.
A ratio above 1 is better for ours; the target is {TARGET}. The last three columns are ours through the front door;
the target is {DOOR_TARGET} of the tokens per second without it, and the first token 1 ms later: the median of each
round's difference, with its confidence interval of 95 %.

{HEAD}
{chr(10).join(rows)}

{datetime.date.today().isoformat()}, {processor_name()}, {os.cpu_count()} cores for client, frontend and workers;
load average {os.getloadavg()[1]:.1f}; Python {platform.python_version()}, {versions}.
"""


def environment(directory: Path) -> dict[str, str]:
    """Variables of processes that find each other on loopback, in files below `directory`."""
    return os.environ | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_FILE_KV": str(directory / "discovery"),
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "PYTHONPATH": str(HERE.parent),
        "WORKER_ENABLE_KV_ROUTING": "false",
    }


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Ports]:
    """A frontend, a front door and both workers on loopback, without services."""
    model = write_tiny_model(directory / "model")
    ports = Ports(_free_port(), _free_port())
    environ = environment(directory) | {
        "DYN_LOG": "error,dynamo_runtime::storage=off",
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "WORKER_MODEL_PATH": str(model),
    }
    frontend = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(ports.frontend)]
    upstream = f"http://127.0.0.1:{ports.frontend}"
    door = ["-m", "worker.frontdoor", "--port", str(ports.door), "--upstream", upstream]
    commands = [frontend, door] + [
        [str(HERE / "serve_worker.py"), name, "--served-model-name", name, "--component", name]
        for name in (OURS, CONSTANT)
    ]
    processes = [subprocess.Popen([sys.executable, *command], env=environ) for command in commands]
    try:
        await_models(ports.door, {OURS, CONSTANT}, processes)
        yield ports
    finally:
        end(reversed(processes))  # the frontend last


def end(processes: Iterable[subprocess.Popen[bytes]], patience_s: float = 60.0) -> None:
    """End processes one after the other; one that takes longer than `patience_s` is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_on_sigterm() -> None:
    """Let SIGTERM end a benchmark as Ctrl-C does, and with it the processes that it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_models(port: int, wanted: set[str], processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Until the models served at a port are those; raises `SystemExit` if a process ends."""
    deadline = time.monotonic() + START_TIMEOUT_S
    names: set[str] = set()
    while names != wanted:
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("a process did not start")
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            names = _served_models(port)


def _served_models(port: int) -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
        return {model["id"] for model in json.load(response)["data"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare our worker, with a free model, to a constant-token engine.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-write", action="store_true", help="leave results/serve.md as it is")
    options = parser.parse_args()
    end_on_sigterm()
    rows = []
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory)) as ports:
        print(HEAD, flush=True)
        for num_streams in options.streams:
            rows.append(row(num_streams, uvloop.run(measure(ports, num_streams, options.tokens, options.rounds))))
            print(rows[-1], flush=True)
    if not options.no_write:
        path = HERE / "results" / "serve.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(report(rows, options.tokens, options.rounds), encoding="utf-8")
        print(f"\nwritten to {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
