"""One Dynamo frontend with 1 to 500 registered workers, by each kind of discovery.

    .venv/bin/python benchmarks/registrations.py
    .venv/bin/python benchmarks/registrations.py --discovery etcd --workers 500

Prints, and writes `results/registrations.md` from what this and earlier runs kept in
`results/registrations.json`: a run replaces the rows that it measures. The instances are those of
`registrants.py`, 50 to a process, each with its own lease; each watches the others as a frontend
does (with files 5 of each process). Dynamo has no discovery by NATS: there, etcd has the
registrations, and NATS the requests.

- **registered**: seconds from the start of the processes until each watcher sees all.
- **idle**: processor time that the frontend, one instance and the server of the discovery take
  without a request, in thousandths of a core.
- **requests**: open loop (`open_loop.py`) for some seconds at each rate, answers of 16 tokens, one
  every 20 ms; first token in ms, p50 / p99 / p99.9, since the request was due, and the frontend's
  processor time for a request.
- **one dies**: one instance's process is killed; until all watchers know. **all die**: all are
  killed, with what removes their entries, as if their machines died; until the frontend lists no
  model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from machine import processor_name
from open_loop import Outcome, drive, due_times, outcome, shown
from runtimes import _program
from serve import HERE, _free_port, _served_models, await_models, end_on_sigterm, environment, stream_completion

from worker.tiny_model import write_tiny_model

MODEL = "constant"
KEPT, REPORT = HERE / "results" / "registrations.json", HERE / "results" / "registrations.md"
FILE, ETCD, NATS = "file", "etcd", "nats"
NAMES = {FILE: "files", ETCD: "etcd", NATS: "etcd, requests by NATS"}
AnyProcess = subprocess.Popen[bytes] | subprocess.Popen[str]
PER_PROCESS = 50
WATCHERS = {FILE: 5, ETCD: PER_PROCESS, NATS: PER_PROCESS}
"""Instances of a process that watch the others: all, but for files, where each needs one of the
128 inotify instances that Linux gives a user by default.
"""
STEP_S, TOKENS = 0.02, 16
DEATH_S = 60


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured with so many workers; times in seconds, shares of a core."""

    discovery: str
    workers: int
    registered_s: float
    idle_frontend: float
    idle_instance: float
    idle_server: float
    frontend_mib: float
    loads: list[tuple[Outcome, float]]
    one_dies_s: float
    all_die_s: float
    machine: str
    date: str


class Pool:
    """A frontend, servers of the discovery, and the processes of the instances.

    Args:
        directory: Holds all state.
        discovery: Kind of discovery.
        workers: Number of instances; the first one has a process of its own.
    """

    def __init__(self, directory: Path, discovery: str, workers: int) -> None:
        self.port, self.workers = _free_port(), workers
        self._environ = environment(directory) | {
            "DYN_LOG": "off",
            "DYN_RUNTIME_NUM_WORKER_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
        }
        self._model = write_tiny_model(directory / "model")
        self.servers: list[subprocess.Popen[bytes]] = []
        self.registrants: list[subprocess.Popen[str]] = []
        self._started: list[AnyProcess] = []
        try:
            self._start(directory, discovery)
        except BaseException:
            self.end()
            raise

    def _start(self, directory: Path, discovery: str) -> None:
        self.servers = self._start_servers(directory, discovery)
        command = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port)]
        self.frontend = subprocess.Popen([sys.executable, *command], env=self._environ)
        self._started.append(self.frontend)
        self._await_health()
        self.started_s = time.monotonic()
        counts = [1] + [min(PER_PROCESS, self.workers - first) for first in range(1, self.workers, PER_PROCESS)]
        self.registrants += [self._start_registrant(count, WATCHERS[discovery]) for count in counts]
        for process in self.registrants:
            assert process.stdout is not None
            assert process.stdout.readline() == "registered\n"

    def _start_servers(self, directory: Path, discovery: str) -> list[subprocess.Popen[bytes]]:
        if discovery == FILE:
            return []
        client, peer, port = _free_port(), _free_port(), _free_port()
        urls = [f"http://127.0.0.1:{one}" for one in (client, peer)]
        commands = [
            [
                *(_program("etcd"), "--data-dir", str(directory / "etcd"), "--log-level", "error"),
                *("--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
                *("--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]),
                *("--initial-cluster", f"default={urls[1]}"),
            ]
        ]
        self._environ |= {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": urls[0]}
        if discovery == NATS:
            commands.append([_program("nats-server"), "-a", "127.0.0.1", "-p", str(port)])
            planes = {"DYN_REQUEST_PLANE": "nats", "DYN_EVENT_PLANE": "nats"}
            self._environ |= {**planes, "NATS_SERVER": f"nats://127.0.0.1:{port}"}
        nowhere = subprocess.DEVNULL
        servers = [subprocess.Popen(command, stdout=nowhere, stderr=nowhere) for command in commands]
        self._started += servers
        time.sleep(1.5)
        return servers

    def _await_health(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                _served_models(self.port)
                return
            if self.frontend.poll() is not None:
                raise SystemExit("registrations: the frontend did not start")
            time.sleep(0.1)

    def _start_registrant(self, count: int, watchers: int) -> subprocess.Popen[str]:
        counts = [str(count), str(watchers)]
        command = [sys.executable, str(HERE / "registrants.py"), *counts, str(self._model), MODEL, str(STEP_S)]
        process = subprocess.Popen(
            command,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._started.append(process)
        return process

    def all_see(self, count: int) -> float:
        """The time at which the last watcher of the living instances saw so many."""
        living = [process for process in self.registrants if process.poll() is None]
        for process in living:
            assert process.stdin is not None
            process.stdin.write(f"count {count}\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in living if process.stdout is not None)

    def processor_s(self, processes: Sequence[AnyProcess]) -> float:
        """Seconds of processor time so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in processes]
        return float(sum(one.user + one.system for one in times))

    def kill_one(self) -> float:
        """Seconds until all watchers know that the first instance died; 0 if it is the only one."""
        if self.workers == 1:
            return 0.0
        began_s = time.monotonic()
        self.registrants[0].kill()
        self.registrants[0].wait()
        return self.all_see(self.workers - 1) - began_s

    def kill_all(self) -> float:
        """Seconds until the frontend lists no model, after all instances died and their guards."""
        living = [process for process in self.registrants if process.poll() is None]
        guards = [guard for process in living for guard in psutil.Process(process.pid).children()]
        began_s = time.monotonic()
        for each in (*guards, *living):
            each.kill()
        while _served_models(self.port):
            if time.monotonic() - began_s > DEATH_S:
                raise SystemExit("registrations: the frontend does not notice that its workers have died")
            time.sleep(0.01)
        return time.monotonic() - began_s

    def end(self) -> None:
        """End all processes, the servers last."""
        for process in reversed(self._started):
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def running(directory: Path, discovery: str, workers: int) -> Iterator[Pool]:
    pool = Pool(directory, discovery, workers)
    try:
        await_models(pool.port, {MODEL}, [pool.frontend])
        yield pool
    finally:
        pool.end()


def load(pool: Pool, rate: float, seconds: float) -> tuple[Outcome, float]:
    """A load's figures, and the frontend's processor time for a request, in seconds."""
    due = due_times(rate, seconds)
    before_s = pool.processor_s([pool.frontend])
    timings = uvloop.run(drive(due, functools.partial(stream_completion, pool.port, MODEL, TOKENS)))
    return outcome(timings, seconds), (pool.processor_s([pool.frontend]) - before_s) / len(due)


def measure(discovery: str, workers: int, rates: Sequence[float], seconds: float) -> Row:
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), discovery, workers) as pool:
        registered_s = pool.all_see(workers) - pool.started_s
        time.sleep(1)
        parts: list[Sequence[AnyProcess]] = [[pool.frontend], pool.registrants, pool.servers]
        before = [pool.processor_s(part) for part in parts]
        time.sleep(seconds)
        idle = [(pool.processor_s(part) - s) / seconds for part, s in zip(parts, before, strict=True)]
        load(pool, 20, 2)  # warm-up
        loads = [load(pool, rate, seconds) for rate in rates]
        memory = psutil.Process(pool.frontend.pid).memory_info().rss / 2**20
        one_dies_s = pool.kill_one()
        all_die_s = pool.kill_all()
    return Row(
        discovery,
        workers,
        registered_s,
        idle[0],
        idle[1] / workers,
        idle[2],
        memory,
        loads,
        one_dies_s,
        all_die_s,
        f"{processor_name()}, {os.cpu_count()} cores",
        datetime.date.today().isoformat(),
    )


HEAD = """| discovery | workers | registered, s | idle, 1/1000 core: frontend | one instance | server | frontend, MiB \
| one dies, s | all die, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
LOADS = """| discovery | workers | requests/s | answered | first token, ms | frontend, µs a request |
| --- | --- | --- | --- | --- | --- |"""


def line(row: Row) -> str:
    one = f"{row.one_dies_s:.2f}" if row.workers > 1 else ""
    return (
        f"| {NAMES[row.discovery]} | {row.workers} | {row.registered_s:.1f} | {row.idle_frontend * 1e3:.0f} "
        f"| {row.idle_instance * 1e3:.1f} | {row.idle_server * 1e3:.0f} | {row.frontend_mib:.0f} "
        f"| {one} | {row.all_die_s:.1f} |"
    )


def load_lines(row: Row) -> list[str]:
    return [
        f"| {NAMES[row.discovery]} | {row.workers} | {found.rate:.0f} | {found.answered:.1%} "
        f"| {shown(found.first_ms)} | {cost_s * 1e6:,.0f} |"
        for found, cost_s in row.loads
    ]


def report(rows: Sequence[Row]) -> str:
    lines = "\n".join(line(row) for row in rows)
    loads = "\n".join(each for row in rows for each in load_lines(row))
    where = sorted({f"{row.date}, {row.machine}" for row in rows})
    return f"""# A frontend with many workers

Made by `.venv/bin/python benchmarks/registrations.py`, which says what is measured. Instances are registered by
processes with {PER_PROCESS} of them each, which answer by a timer.

{HEAD}
{lines}

{LOADS}
{loads}

{"; ".join(where)} for client, servers, frontend and instances.
"""


def kept_rows() -> dict[str, Row]:
    """What earlier runs measured, by discovery and number of workers."""
    if not KEPT.is_file():
        return {}
    rows = json.loads(KEPT.read_text(encoding="utf-8"))
    return {
        key: Row(**{**row, "loads": [(Outcome(**found), cost_s) for found, cost_s in row["loads"]]})
        for key, row in rows.items()
    }


def keep(row: Row) -> None:
    """Write it beside the others."""
    rows = kept_rows() | {f"{row.discovery} {row.workers}": row}
    ordered = dict(sorted(rows.items(), key=lambda pair: (list(NAMES).index(pair[1].discovery), pair[1].workers)))
    text = json.dumps({key: dataclasses.asdict(one) for key, one in ordered.items()}, indent=1)
    KEPT.write_text(text + "\n", encoding="utf-8")
    REPORT.write_text(report(list(ordered.values())), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one frontend with many registered workers.")
    parser.add_argument("--discovery", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 16, 64, 250, 500])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 150], help="requests a second")
    parser.add_argument("--seconds", type=float, default=8, help="of each load, and without one")
    parser.add_argument("--no-write", action="store_true", help="leave the results as they are")
    options = parser.parse_args()
    end_on_sigterm()
    print(HEAD, flush=True)
    for discovery in options.discovery:
        for workers in options.workers:
            row = measure(discovery, workers, options.rates, options.seconds)
            print("\n".join([line(row), *load_lines(row)]), flush=True)
            if not options.no_write:
                keep(row)


if __name__ == "__main__":
    main()
