"""What one worker's boundary store takes: files, etcd and NATS.

    .venv/bin/python benchmarks/stores.py

Each request reads and writes its record before its first token, and reads and removes it later:
here at once, by `worker.migration`'s own clients. Open loop (`open_loop.py`), at rates that rise by
half until one request of a hundred waits longer than 100 ms for its record. **before the first
token** is what the store adds to a request's first token. The processor time of the worker's part
(this process, its clock of arrivals included) and of the server is that at the highest rate before
the bend. Prints a table, and keeps it in `results/stores.json` and `results/stores.md`. Servers
are single ones, etcd with its files synchronised.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import psutil
import uvloop
from machine import processor_name
from open_loop import Outcome, climb, drive, due_times, keep, limit, outcome, shown
from runtimes import _program
from serve import HERE, _free_port, end_on_sigterm

from worker.errors import BoundaryStoreUnavailable
from worker.migration.boundary import Boundary
from worker.migration.named_store import make_store
from worker.migration.record_store import RecordStore
from worker.migration.store import StoreError

KEPT, REPORT = HERE / "results" / "stores.json", HERE / "results" / "stores.md"
KINDS = ("file", "etcd", "nats")
START = 150.0
OWNER = "benchmark-1"
RECORD = Boundary(
    prompt_length=512,
    prompt_digest=blake2b(b"prompt", digest_size=16).hexdigest(),
    max_tokens=128,
    min_tokens=None,
    seed=1,
    owner=OWNER,
    attempts=1,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A store's limit.

    Attributes:
        kind: Kind of the store.
        best: The outcome at the highest rate that did not bend it.
        bent: The rate that did.
        worker_us: Microseconds of the worker's processor time for a request.
        server_us: The same of the server's.
    """

    kind: str
    best: Outcome
    bent: float
    worker_us: float
    server_us: float
    machine: str
    date: str


@contextlib.contextmanager
def serving(kind: str, directory: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Address of a store, and the processes of its server."""
    if kind == "file":
        yield f"file:{directory / 'boundaries'}", []
        return
    port, peer = _free_port(), _free_port()
    urls = [f"http://127.0.0.1:{one}" for one in (port, peer)]
    commands = {
        "etcd": [
            *("etcd", "--data-dir", str(directory / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
            *("--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]),
            *("--initial-cluster", f"default={urls[1]}"),
        ],
        "nats": ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory / "nats")],
    }
    name, *arguments = commands[kind]
    server = subprocess.Popen([_program(name), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        address = f"etcd:{urls[0]}" if kind == "etcd" else f"nats://127.0.0.1:{port}"
        yield address, [psutil.Process(server.pid)]
    finally:
        server.kill()
        server.wait()


def processor_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


@contextlib.asynccontextmanager
async def opened(address: str) -> AsyncIterator[RecordStore]:
    store = RecordStore(make_store(address))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def put_under_load(address: str, rate: float, seconds: float) -> Outcome:
    """What becomes of requests that come at a rate."""
    numbers = itertools.count()
    async with opened(address) as store:

        async def ask(first: Callable[[], None]) -> None:
            key = blake2b(f"{rate} {next(numbers)}".encode(), digest_size=16).hexdigest()
            try:
                await store.read(key)
                await store.write(key, RECORD)
                first()
                await store.update(key, OWNER, lambda _: None)
            except (StoreError, BoundaryStoreUnavailable) as error:
                raise RuntimeError(str(error)) from None

        await drive(due_times(20, 0.5), ask)  # connects
        return outcome(await drive(due_times(rate, seconds), ask), seconds)


def measure(kind: str, seconds: float) -> Row:
    costs = {}
    with tempfile.TemporaryDirectory() as directory, serving(kind, Path(directory)) as (address, server):

        def load(rate: float) -> Outcome:
            parts = [[psutil.Process()], server]
            before = [processor_s(part) for part in parts]
            found = uvloop.run(put_under_load(address, rate, seconds))
            count = found.rate * seconds
            costs[found.rate] = [(processor_s(part) - s) / count * 1e6 for part, s in zip(parts, before, strict=True)]
            print(f"  {kind}: {found.rate:,.0f}/s {shown(found.first_ms)} ms", flush=True)
            return found

        found = climb(load, START)
    best = limit(found)
    machine = f"{processor_name()}, {os.cpu_count()} cores"
    worker_us, server_us = costs[best.rate]
    return Row(kind, best, found[-1].rate, worker_us, server_us, machine, datetime.date.today().isoformat())


TABLE = """| store | requests/s | before the first token, ms | whole life, ms | worker, µs a request \
| server | bent at |
| --- | --- | --- | --- | --- | --- | --- |"""


def line(row: Row) -> str:
    best = row.best
    return (
        f"| {row.kind} | {best.rate:,.0f} | {shown(best.first_ms)} | {shown(best.end_ms)} "
        f"| {row.worker_us:,.0f} | {row.server_us:,.0f} | {row.bent:,.0f} |"
    )


def report(rows: Sequence[Row]) -> str:
    where = sorted({f"{row.date}, {row.machine}" for row in rows})
    return f"""# Boundary stores

Made by `.venv/bin/python benchmarks/stores.py`, which says what is measured: one worker's share.
Times are p50 / p99 / p99.9.

{TABLE}
{chr(10).join(map(line, rows))}

{"; ".join(where)}.
"""


def write(row: Row) -> None:
    kept = keep(KEPT, row.kind, row)
    rows = [Row(**{**kept[kind], "best": Outcome(**kept[kind]["best"])}) for kind in KINDS if kind in kept]
    REPORT.write_text(report(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the boundary stores.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=5, help="of each rate")
    parser.add_argument("--no-write", action="store_true", help="leave the results as they are")
    options = parser.parse_args()
    end_on_sigterm()
    print(TABLE, flush=True)
    for kind in options.kinds:
        row = measure(kind, options.seconds)
        print(line(row), flush=True)
        if not options.no_write:
            write(row)


if __name__ == "__main__":
    main()
