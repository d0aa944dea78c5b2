"""Three ways to a worker: Dynamo over TCP, Dynamo over NATS, and the NATS runtime.

    .venv/bin/python benchmarks/runtimes.py

The worker has a model whose forward pass costs nothing (`serve_worker.py`), so that what is
measured is the way. All stacks run beside one another and are driven in turn with 1, 16 and 64
streams; a table of medians is printed, and kept in `results/runtimes.md`. The NATS runtime is to
give at least 0.8 of the tokens per second of Dynamo over TCP.

Client, servers, frontends and workers share the machine: read the ratios. Over HTTP the client
looks for the end of the stream in raw bytes; over NATS it is `WorkerClient`, which decodes every
message.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import uvloop
from machine import processor_name
from serve import Medians, Sample, _free_port, drive, end, end_on_sigterm

from worker.runtimes.nats.client import WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions
from worker.tiny_model import write_tiny_model

HERE = Path(__file__).resolve().parent
MODEL = "ours"
TCP, PLANES, RUNTIME = "Dynamo, TCP", "Dynamo, NATS", "NATS runtime"
TARGET = 0.8
START_TIMEOUT_S = 180

Drive = Callable[[int, int], Awaitable[Sample]]


async def drive_nats(client: WorkerClient, num_streams: int, num_tokens: int) -> Sample:
    """As `serve.drive`, over NATS."""
    per_stream = max(2, 16 // num_streams)

    async def one() -> list[float]:
        ttfts = []
        for _ in range(per_stream):
            started, first, tokens = time.perf_counter(), None, 0
            async for chunk in client.stream(
                prompt="Hello", stop_conditions={"max_tokens": num_tokens, "ignore_eos": True}
            ):
                first = first or time.perf_counter()
                tokens += len(chunk["token_ids"])
            if tokens != num_tokens or first is None:
                raise RuntimeError(f"{tokens} tokens instead of {num_tokens}")
            ttfts.append(first - started)
        return ttfts

    started = time.perf_counter()
    ttfts = await asyncio.gather(*(one() for _ in range(num_streams)))
    duration_s = time.perf_counter() - started
    return Sample(num_streams * per_stream * num_tokens / duration_s, [ttft for each in ttfts for ttft in each])


async def measure(ways: dict[str, Drive], num_streams: int, num_tokens: int, num_rounds: int) -> dict[str, Medians]:
    """They take turns, and who goes first alternates."""
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    for each in ways.values():
        await each(num_streams, num_tokens)  # warm-up
    for number in range(num_rounds):
        for way in list(ways) if number % 2 == 0 else reversed(ways):
            samples[way].append(await ways[way](num_streams, num_tokens))
    return {way: Medians.of(taken) for way, taken in samples.items()}


HEAD = (
    f"| streams | tokens/s: {TCP} | {PLANES} | {RUNTIME} | runtime to TCP "
    f"| first token in ms: {TCP} | {PLANES} | {RUNTIME} |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def row(num_streams: int, medians: dict[str, Medians]) -> str:
    rates = " | ".join(f"{medians[way].tokens_per_s:,.0f}" for way in (TCP, PLANES, RUNTIME))
    firsts = " | ".join(f"{medians[way].ttft_s * 1e3:.1f}" for way in (TCP, PLANES, RUNTIME))
    ratio = medians[RUNTIME].tokens_per_s / medians[TCP].tokens_per_s
    return f"| {num_streams} | {rates} | {ratio:.2f} | {firsts} |"


def report(rows: Sequence[str], num_tokens: int, num_rounds: int) -> str:
    return f"""# Ways to a worker

Made by `.venv/bin/python benchmarks/runtimes.py`, which says what is compared. Medians of {num_rounds} interleaved
rounds with {num_tokens} tokens per request, of the first token over all requests. The target is {TARGET} of TCP's
tokens per second for the NATS runtime.

{HEAD}
{chr(10).join(rows)}

{datetime.date.today().isoformat()}, {processor_name()}, {os.cpu_count()} cores for clients, servers and workers;
load average {os.getloadavg()[1]:.1f}; Python {platform.python_version()}.
"""


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[int, int, str]]:
    """Ports of the frontends over TCP and NATS, and the URL of NATS."""
    model = write_tiny_model(directory / "model")
    nats, etcd, peer, tcp_port, nats_port = (_free_port() for _ in range(5))
    etcd_url, peer_url, nats_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}", f"nats://127.0.0.1:{nats}"
    shared = {
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_LOG": "error,dynamo_runtime::storage=off",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "HOME": str(directory),
        "PYTHONPATH": str(HERE.parent),
        "TMPDIR": str(directory),
        "WORKER_ENABLE_KV_ROUTING": "false",
        "WORKER_MODEL_PATH": str(model),
        "WORKER_SERVED_MODEL_NAME": MODEL,
    }
    tcp = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(directory / "discovery"), "DYN_EVENT_PLANE": "zmq"}
    planes = {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": etcd_url,
        "DYN_REQUEST_PLANE": "nats",
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": nats_url,
    }
    frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port"]
    worker = [sys.executable, str(HERE / "serve_worker.py")]
    peers = ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
    clients = ["--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url]
    data = ["--data-dir", str(directory / "etcd"), "--initial-cluster", f"default={peer_url}", "--log-level", "error"]
    commands: list[tuple[list[str], dict[str, str]]] = [
        ([_program("nats-server"), "-a", "127.0.0.1", "-p", str(nats), "-js", "-sd", str(directory / "nats")], {}),
        ([_program("etcd"), *data, *clients, *peers], {}),
        ([*frontend, str(tcp_port)], tcp),
        ([*frontend, str(nats_port)], planes),
        ([*worker, "ours"], tcp),
        ([*worker, "ours"], planes),
        ([*worker, "nats"], {"WORKER_NATS_URL": nats_url}),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, (command, environment) in enumerate(commands):
            log = (directory / f"{number}.log").open("wb")
            processes.append(
                subprocess.Popen(command, env=os.environ | shared | environment, stdout=log, stderr=subprocess.STDOUT)
            )
            if number < 2:
                time.sleep(1)  # the servers first
        for port in (tcp_port, nats_port):
            _await_model(port, processes)
        yield tcp_port, nats_port, nats_url
    finally:
        end(reversed(processes))


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"runtimes: no {name}")
    return found


def _await_model(port: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("runtimes: a process did not start")
        time.sleep(0.2)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply,
        ):
            if any(model["id"] == MODEL for model in json.load(reply)["data"]):
                return


async def compare(ports: tuple[int, int, str], options: argparse.Namespace) -> list[str]:
    """A row per number of streams."""
    tcp_port, nats_port, nats_url = ports
    rows = []
    async with await WorkerClient.connect(MODEL, options=ConnectionOptions(url=nats_url)) as client:
        ways: dict[str, Drive] = {
            TCP: lambda streams, tokens: drive(tcp_port, MODEL, streams, tokens),
            PLANES: lambda streams, tokens: drive(nats_port, MODEL, streams, tokens),
            RUNTIME: lambda streams, tokens: drive_nats(client, streams, tokens),
        }
        for num_streams in options.streams:
            rows.append(row(num_streams, await measure(ways, num_streams, options.tokens, options.rounds)))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Dynamo over TCP and over NATS with the NATS runtime.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="leave results/runtimes.md as it is")
    options = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory)) as ports:
        print(HEAD, flush=True)
        rows = uvloop.run(compare(ports, options))
    if not options.no_write:
        path = HERE / "results" / "runtimes.md"
        path.write_text(report(rows, options.tokens, options.rounds), encoding="utf-8")
        print(f"\nwritten to {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
