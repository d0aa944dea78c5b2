"""Workers of the NATS runtime that share a queue group: 1, 4 and 16 of them.

    .venv/bin/python benchmarks/consumer_group.py

One nats-server, workers with ``--engine constant`` and steps of 20 ms, and this process, which has
the clients (`WorkerClient`, which decodes and acknowledges). Two loads, open loop (`open_loop.py`),
at rates that rise by half until one request of a hundred waits longer than 100 ms for its first
token beyond a step: answers of one token, and of 64. Clients, server and workers share the cores;
so beside the rate before the bend there is the processor time of the server, of all workers and of
the clients for a request, from which follows what one core of each could serve. Prints a table, and
keeps it in `results/consumer_group.json` and `results/consumer_group.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nats
import psutil
import uvloop
from machine import processor_name
from open_loop import Outcome, climb, drive, due_times, keep, limit, outcome, shown
from runtimes import _program
from serve import HERE, _free_port, end_on_sigterm
from stores import processor_s

from worker.errors import StartupError
from worker.runtimes.nats.client import RequestError, WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions
from worker.tiny_model import write_tiny_model

KEPT, REPORT = HERE / "results" / "consumer_group.json", HERE / "results" / "consumer_group.md"
MODEL = "constant"
STEP_S = 0.02
LOADS = {"short": 1, "long": 64}
STARTS = {"short": 40.0, "long": 12.0}
START_S = 120


@dataclass(frozen=True, slots=True)
class Row:
    """A load's limit with so many workers; microseconds of processor time are for a request."""

    load: str
    count: int
    best: Outcome
    bent: float
    server_us: float
    workers_us: float
    client_us: float
    machine: str
    date: str


@dataclass(frozen=True, slots=True)
class Group:
    """A server and the workers of a group."""

    url: str
    server: psutil.Process
    workers: list[psutil.Process]


@contextlib.contextmanager
def running(directory: Path, count: int) -> Iterator[Group]:
    """A group that takes requests."""
    port, model = _free_port(), write_tiny_model(directory / "model")
    url = f"nats://127.0.0.1:{port}"
    environ = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    server = [_program("nats-server"), "-a", "127.0.0.1", "-p", str(port)]
    worker = [
        *(sys.executable, "-m", "worker", "--runtime", "nats", "--nats-url", url, "--model-path", str(model)),
        *("--served-model-name", MODEL, "--engine", "constant", "--constant-step-s", str(STEP_S)),
        *("--max-num-seqs", "256"),
    ]
    nowhere = subprocess.DEVNULL
    processes = [subprocess.Popen(server, stdout=nowhere, stderr=nowhere)]
    try:
        time.sleep(1)
        for _ in range(count):
            processes.append(subprocess.Popen(worker, env=environ, stdout=nowhere, stderr=nowhere))
        uvloop.run(await_workers(url, count))
        found = [psutil.Process(process.pid) for process in processes]
        yield Group(url, found[0], found[1:])
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


async def await_workers(url: str, count: int) -> None:
    """Until so many workers answer to a ping of NATS services."""
    deadline, seen = time.monotonic() + START_S, set[str]()
    client = await nats.connect(url)
    while len(seen) < count:
        if time.monotonic() > deadline:
            raise SystemExit("consumer_group: the workers did not start")
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish("$SRV.PING", reply=inbox)
        with contextlib.suppress(nats.errors.TimeoutError):
            while True:
                data = (await replies.next_msg(0.5)).data
                if data:  # else it says that nobody listens
                    seen.add(json.loads(data)["id"])
        await replies.unsubscribe()
    await client.close()


async def put_under_load(url: str, num_tokens: int, rate: float, seconds: float) -> Outcome:
    async with await WorkerClient.connect(MODEL, options=ConnectionOptions(url=url)) as client:

        async def ask(first: Callable[[], None]) -> None:
            tokens = 0
            stops = {"max_tokens": num_tokens, "ignore_eos": True}
            try:
                async for chunk in client.stream(prompt="Hello", stop_conditions=stops, retries=0):
                    if not tokens:
                        first()
                    tokens += len(chunk["token_ids"])
            except (RequestError, StartupError) as error:
                raise RuntimeError(str(error)) from None
            if tokens != num_tokens:
                raise RuntimeError(f"{tokens} tokens instead of {num_tokens}")

        return outcome(await drive(due_times(rate, seconds), ask), seconds)


def measure(group: Group, name: str, seconds: float) -> Row:
    costs = {}

    def load(rate: float) -> Outcome:
        parts = [[group.server], group.workers, [psutil.Process()]]
        before = [processor_s(part) for part in parts]
        found = uvloop.run(put_under_load(group.url, LOADS[name], rate, seconds))
        count = found.rate * seconds
        costs[found.rate] = [(processor_s(part) - s) / count * 1e6 for part, s in zip(parts, before, strict=True)]
        print(f"  {name}, {len(group.workers)}: {found.rate:,.0f}/s {shown(found.first_ms)} ms", flush=True)
        return found

    load(STARTS[name] / 2)  # warm-up
    found = climb(load, STARTS[name])
    best = limit(found)
    machine, today = f"{processor_name()}, {os.cpu_count()} cores", datetime.date.today().isoformat()
    server_us, workers_us, client_us = costs[best.rate]
    return Row(
        name, len(group.workers), best, found[-1].rate, server_us, workers_us, client_us, machine=machine, date=today
    )


TABLE = """| load | workers | requests/s | tokens/s | first token, ms | answered, ms | µs a request: server \
| all workers | client | bent at |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(row: Row) -> str:
    best = row.best
    return (
        f"| {row.load} | {row.count} | {best.rate:,.0f} | {best.rate * LOADS[row.load]:,.0f} | {shown(best.first_ms)} "
        f"| {shown(best.end_ms)} | {row.server_us:,.0f} | {row.workers_us:,.0f} | {row.client_us:,.0f} "
        f"| {row.bent:,.0f} |"
    )


def report(rows: Sequence[Row]) -> str:
    where = sorted({f"{row.date}, {row.machine}" for row in rows})
    return f"""# A group of workers behind NATS

Made by `.venv/bin/python benchmarks/consumer_group.py`, which says what is measured; times are p50 / p99 / p99.9.
Answers have {LOADS["short"]} or {LOADS["long"]} tokens.

{TABLE}
{chr(10).join(map(line, rows))}

{"; ".join(where)} for clients, server and workers.
"""


def write(row: Row) -> None:
    kept = keep(KEPT, f"{row.load} {row.count:02}", row)
    rows = [Row(**{**one, "best": Outcome(**one["best"])}) for one in kept.values()]
    REPORT.write_text(report(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure workers of the NATS runtime that share a queue group.")
    parser.add_argument("--count", type=int, nargs="+", default=[1, 4, 16], help="workers")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=5, help="of each rate")
    parser.add_argument("--no-write", action="store_true", help="leave the results as they are")
    options = parser.parse_args()
    end_on_sigterm()
    print(TABLE, flush=True)
    for count in options.count:
        with tempfile.TemporaryDirectory() as directory, running(Path(directory), count) as group:
            for name in options.loads:
                row = measure(group, name, options.seconds)
                print(line(row), flush=True)
                if not options.no_write:
                    write(row)


if __name__ == "__main__":
    main()
