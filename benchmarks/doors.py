"""Front doors that share a port: 1, 4 and 16 processes behind SO_REUSEPORT.

    .venv/bin/python benchmarks/doors.py

Two loads, open loop (`open_loop.py`), at rates that rise by half until one request of a hundred
waits longer than 100 ms for its first token: **short** answers of one token, which show requests,
and **long** ones of 64 tokens, one every 20 ms, which show tokens. A process of this script plays
the frontend, this one the clients; both do as little as they can, and share the cores with the
front doors. Prints the highest rate before the bend, and there the latency since a request was
due, the processor time of all front doors for a request, the share of the busiest of them, and
their memory (each page counted once); keeps all in `results/doors.json` and `results/doors.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import uvloop
from machine import processor_name
from open_loop import Outcome, climb, drive, due_times, keep, limit, outcome, shown
from serve import HERE, _free_port, end_on_sigterm

KEPT, REPORT = HERE / "results" / "doors.json", HERE / "results" / "doors.md"
STEP_S = 0.02
LOADS = {"short": 1, "long": 64}
"""Tokens of an answer."""
STARTS = {"short": 400.0, "long": 60.0}
"""Rate to begin with."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-1","choices":[{"text":"a","index":0,"logprobs":null,"finish_reason":null}],'
    b'"created":1790000000,"model":"m","object":"text_completion"}\n\n'
)
END = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Frontend(asyncio.Protocol):
    """Answers each request on a connection; the number of tokens is its ``max_tokens``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            answer = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
        elif len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        else:
            self._transport.write(HEAD + chunked(EVENT))
            self._say(json.loads(body)["max_tokens"] - 1, asyncio.get_running_loop().time())
        self._received = b""

    def _say(self, left: int, due_s: float) -> None:
        """One more token, or the end."""
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(chunked(END) + b"0\r\n\r\n")
            return
        if due_s <= asyncio.get_running_loop().time() - STEP_S:
            self._transport.write(chunked(EVENT))
            left -= 1
            due_s += STEP_S
        asyncio.get_running_loop().call_at(due_s + STEP_S, self._say, left, due_s)


async def serve_frontend(port: int) -> None:
    """Play the frontend until the process is ended."""
    await asyncio.get_running_loop().create_server(Frontend, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


class Client(asyncio.Protocol):
    """Sends one request, and waits for the end of its answer."""

    def __init__(self, request: bytes, first: Callable[[], None]) -> None:
        self._request, self._first = request, first
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._tail and b"data: " in data:
            self._first()
        self._tail = (self._tail + data)[-40:] if self._tail or b"data: " in data else b""
        if b"[DONE]" in self._tail and not self.ended.done():
            self.ended.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("the stream was cut"))


def request_of(num_tokens: int) -> bytes:
    body = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": num_tokens, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class Doors:
    """`count` front doors at one port, before one frontend."""

    def __init__(self, count: int) -> None:
        self.port, upstream = _free_port(), _free_port()
        environ = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        self.frontend = subprocess.Popen([sys.executable, __file__, "--serve-frontend", str(upstream)], env=environ)
        command = ["-m", "worker.frontdoor", "--port", str(self.port), "--upstream", f"http://127.0.0.1:{upstream}"]
        command += ["--reuse-port", "--response-store-mib", "0"]
        quiet = {"stderr": subprocess.PIPE, "text": True}
        self.processes = [
            subprocess.Popen([sys.executable, *command], env=environ, **quiet)  # type: ignore[call-overload]
            for _ in range(count)
        ]

    def await_doors(self) -> None:
        """Until all of them serve; raises `SystemExit` if one ends."""
        for process in self.processes:
            while "front door on" not in (said := process.stderr.readline()):
                if not said:
                    raise SystemExit("doors: a front door did not start")

    def processor_s(self) -> list[float]:
        """Seconds of processor time of each front door so far."""
        paths = [Path(f"/proc/{process.pid}/schedstat") for process in self.processes]
        return [int(path.read_text().split()[0]) / 1e9 for path in paths]

    def memory_mib(self) -> float:
        """Of all front doors; a page that several share counts once."""
        return float(sum(psutil.Process(process.pid).memory_full_info().pss for process in self.processes)) / 2**20

    def ask(self, request: bytes) -> Callable[[Callable[[], None]], asyncio.Future[None]]:
        """A way to send a request."""

        async def ask(first: Callable[[], None]) -> None:
            loop = asyncio.get_running_loop()
            _, client = await loop.create_connection(lambda: Client(request, first), "127.0.0.1", self.port)
            await client.ended

        return ask  # type: ignore[return-value]

    def end(self) -> None:
        for process in (*self.processes, self.frontend):
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(count: int) -> Iterator[Doors]:
    doors = Doors(count)
    try:
        doors.await_doors()
        yield doors
    finally:
        doors.end()


@dataclass(frozen=True, slots=True)
class Row:
    """A load's limit with so many front doors.

    Attributes:
        load: Name of the load.
        count: Front doors.
        best: The outcome at the highest rate that did not bend them.
        bent: The rate that did.
        request_us: Microseconds of all front doors' processor time for a request.
        busiest: Share of that time that the busiest front door took.
        clients: Share of a core that the clients took.
        memory_mib: MiB of all front doors, at the end.
    """

    load: str
    count: int
    best: Outcome
    bent: float
    request_us: float
    busiest: float
    clients: float
    memory_mib: float
    machine: str
    date: str


def measure(doors: Doors, name: str, seconds: float) -> Row:
    """Higher and higher rates of a load."""
    ask, costs = doors.ask(request_of(LOADS[name])), {}

    def load(rate: float) -> Outcome:
        due, before, clients_s = due_times(rate, seconds), doors.processor_s(), time.process_time()
        found = outcome(uvloop.run(drive(due, ask)), seconds)
        taken = [after - s for after, s in zip(doors.processor_s(), before, strict=True)]
        clients = (time.process_time() - clients_s) / seconds
        costs[found.rate] = sum(taken) / len(due) * 1e6, max(taken) / sum(taken), clients
        print(
            f"  {name}, {len(doors.processes)}: {found.rate:,.0f}/s {shown(found.first_ms)} ms, clients {clients:.0%}",
            flush=True,
        )
        time.sleep(0.5)
        return found

    load(STARTS[name] / 4)  # warm-up
    found = climb(load, STARTS[name])
    best = limit(found)
    machine = f"{processor_name()}, {os.cpu_count()} cores"
    today = datetime.date.today().isoformat()
    return Row(name, len(doors.processes), best, found[-1].rate, *costs[best.rate], doors.memory_mib(), machine, today)


TABLE = """| load | front doors | requests/s | tokens/s | first token, ms | answered, ms | µs a request | busiest \
| clients | MiB | bent at |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(row: Row) -> str:
    best = row.best
    return (
        f"| {row.load} | {row.count} | {best.rate:,.0f} | {best.rate * LOADS[row.load]:,.0f} | {shown(best.first_ms)} "
        f"| {shown(best.end_ms)} | {row.request_us:,.0f} | {row.busiest:.0%} | {row.clients:.0%} "
        f"| {row.memory_mib:,.0f} | {row.bent:,.0f} |"
    )


def report(rows: Sequence[Row]) -> str:
    where = sorted({f"{row.date}, {row.machine}" for row in rows})
    return f"""# Front doors that share a port

Made by `.venv/bin/python benchmarks/doors.py`, which says what is measured; times are p50 / p99 / p99.9. Clients and
frontend share the cores with the front doors, so that more than two of these add nothing but their memory here.

{TABLE}
{chr(10).join(map(line, rows))}

{"; ".join(where)}.
"""


def write(row: Row) -> None:
    kept = keep(KEPT, f"{row.load} {row.count:02}", row)
    rows = [Row(**{**one, "best": Outcome(**one["best"])}) for one in kept.values()]
    REPORT.write_text(report(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure front doors that share a port.")
    parser.add_argument("--count", type=int, nargs="+", default=[1, 4, 16], help="front doors")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=4, help="of each rate")
    parser.add_argument("--no-write", action="store_true", help="leave the results as they are")
    parser.add_argument("--serve-frontend", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_frontend:
        uvloop.run(serve_frontend(options.serve_frontend))
        return
    end_on_sigterm()
    print(TABLE, flush=True)
    for count in options.count:
        with running(count) as doors:
            for name in options.loads:
                row = measure(doors, name, options.seconds)
                print(line(row), flush=True)
                if not options.no_write:
                    write(row)


if __name__ == "__main__":
    main()
