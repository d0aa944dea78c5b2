"""What the front door costs: CPU time of its process per request and per event.

    .venv/bin/python benchmarks/front_door.py

This process plays the clients and the frontend, on sockets of loopback. Each request is a chat as
the openai package sends it, on a connection of its own; each answer is a stream of events, which
the frontend writes one at a time, to all streams before the clients read them. Two servers take
turns between them: the front door, and a relay on the same event loop (uvloop) that passes on
whatever comes and checks nothing, which is about what the sockets cost. Prints the medians and
writes them to `results/front_door.md`, and below them what the front door adds to the time to
first token (`front_door_first.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import uvloop
from front_door_first import Wire, interval, measure_first, pin
from machine import processor_name
from serve import _free_port, end_on_sigterm

HERE = Path(__file__).resolve().parent
REPORT = HERE / "results" / "front_door.md"
DOOR, RELAY = "front door", "relay"
START_TIMEOUT_S, TIMEOUT_S = 120, 30
SETTLE_S = 0.005
"""For what a server still does when everything has been read."""

BODY = json.dumps(
    {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. " * 8},
            {"role": "user", "content": "What is the capital of France? " * 8},
        ],
        "model": "my-model",
        "max_tokens": 256,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.95,
    }
).encode()
REQUEST = b"\r\n".join(
    [
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: 127.0.0.1:8000",
        b"Accept-Encoding: gzip, deflate",
        b"Connection: close",
        b"Accept: application/json",
        b"Content-Type: application/json",
        b"User-Agent: OpenAI/Python 2.8.1",
        b"X-Stainless-Lang: python",
        b"X-Stainless-Package-Version: 2.8.1",
        b"X-Stainless-OS: Linux",
        b"X-Stainless-Arch: x64",
        b"X-Stainless-Runtime: CPython",
        b"X-Stainless-Runtime-Version: 3.11.7",
        b"Authorization: Bearer unused",
        b"X-Stainless-Async: false",
        b"x-stainless-retry-count: 0",
        b"x-stainless-read-timeout: 600",
        b"Content-Length: %d" % len(BODY),
        b"",
        BODY,
    ]
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\ndate: Sun, 22 Nov 2026 12:00:00 GMT\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-29e5ae3a-2759-4b0d-aaed-0f04d0f4845b","choices":[{"index":0,"delta":{"content":" Paris",'
    b'"role":"assistant"},"finish_reason":null}],"created":1795345815,"model":"my-model","object":'
    b'"chat.completion.chunk"}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Relay(asyncio.Protocol):
    """Passes on whatever a client sends, on a connection to the frontend that it keeps.

    Args:
        port: Of the frontend.
        idle: Connections to it that nobody uses.
    """

    def __init__(self, port: int, idle: list[RelayedTo]) -> None:
        self._port = port
        self._idle = idle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._send(self._idle.pop(), data)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(data))

    async def _connect(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, frontend = await loop.create_connection(lambda: RelayedTo(self._idle), "127.0.0.1", self._port)
        self._send(frontend, data)

    def _send(self, frontend: RelayedTo, data: bytes) -> None:
        frontend.client = self.transport
        frontend.transport.write(data)


class RelayedTo(asyncio.Protocol):
    """A connection of `Relay` to the frontend."""

    def __init__(self, idle: list[RelayedTo]) -> None:
        self._idle = idle
        self.client: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.client.write(data)
        if data.endswith(b"\r\n0\r\n\r\n"):
            self.client.close()
            self._idle.append(self)


async def serve_relay(port: int, frontend: int) -> None:
    """Serve until the process is ended."""
    idle: list[RelayedTo] = []
    await asyncio.get_running_loop().create_server(lambda: Relay(frontend, idle), "127.0.0.1", port)
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Server:
    """A server between clients and frontend.

    Attributes:
        port: On which it serves.
        listener: Of the frontend.
        process: Its process.
        kept: Its connections to the frontend.
    """

    port: int
    listener: socket.socket
    process: subprocess.Popen[bytes]
    kept: list[socket.socket]

    def cpu_s(self) -> float:
        """CPU time of its event loop's thread until now."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def running(name: str) -> Iterator[Server]:
    """The server in a process of its own, once it takes connections."""
    port = _free_port()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        frontend = listener.getsockname()[1]
        door = ["-m", "worker.frontdoor", "--port", str(port), "--upstream", f"http://127.0.0.1:{frontend}"]
        command = door if name == DOOR else [__file__, "--serve-relay", str(port), str(frontend)]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
        process = subprocess.Popen([sys.executable, *command], env=environment)
        try:
            _await_connection(port, process)
            yield Server(port, listener, process, [])
        finally:
            process.kill()
            process.wait()


def _await_connection(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit("front_door: a server did not start")
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time in microseconds.

    Attributes:
        request: Of a request and the beginning and end of its answer, with its connection.
        event: Of an event.
    """

    request: float
    event: float


def measure(server: Server, num_streams: int, num_events: int) -> Cost:
    """One round: as many requests at once, and the events of their answers."""
    begun = server.cpu_s()
    clients = []
    for _ in range(num_streams):
        clients.append(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S))
        clients[-1].sendall(REQUEST)
    asked = _asked(server, num_streams)
    _pass_on(HEAD, asked, clients)
    time.sleep(SETTLE_S)
    streaming = server.cpu_s()
    for _ in range(num_events):
        _pass_on(CHUNK, asked, clients)
    time.sleep(SETTLE_S)
    streamed = server.cpu_s()
    _pass_on(LAST, asked, clients)
    for client in clients:
        assert client.recv(1) == b""
        client.close()
    time.sleep(SETTLE_S)
    ended = server.cpu_s()
    return Cost(
        (ended - streamed + streaming - begun) / num_streams * 1e6,
        (streamed - streaming) / num_streams / num_events * 1e6,
    )


def _asked(server: Server, count: int) -> list[socket.socket]:
    """The connections to the frontend on which so many requests have come."""
    waiting = {each.fileno(): each for each in [server.listener, *server.kept]}
    poll = select.poll()
    for number in waiting:
        poll.register(number, select.POLLIN)
    asked: list[socket.socket] = []
    while len(asked) < count:
        for number, _ in poll.poll(TIMEOUT_S * 1000) or _stuck():
            if waiting[number] is server.listener:
                connection, _ = server.listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server.kept.append(connection)
                waiting[connection.fileno()] = connection
                poll.register(connection, select.POLLIN)
            else:
                assert waiting[number].recv(1 << 16).endswith(BODY)
                asked.append(waiting[number])
                poll.unregister(number)
    return asked


def _stuck() -> NoReturn:
    raise SystemExit("front_door: a server does not pass on its requests")


def _pass_on(data: bytes, frontends: Sequence[socket.socket], clients: Sequence[socket.socket]) -> None:
    for frontend in frontends:
        frontend.sendall(data)
    for client in clients:
        num_left = len(data)
        while num_left:
            received = client.recv(num_left)
            if not received:
                raise SystemExit("front_door: a server has closed a connection in the middle of an answer")
            num_left -= len(received)


def row(num_streams: int, costs: dict[str, list[Cost]]) -> str:
    def median(name: str, part: Callable[[Cost], float]) -> float:
        return statistics.median(map(part, costs[name]))

    cells = []
    for part in (lambda cost: cost.request, lambda cost: cost.event):
        door, relay = median(DOOR, part), median(RELAY, part)
        cells += [f"{door:.1f}", f"{relay:.1f}", f"{door - relay:+.1f}"]
    return f"| {num_streams} | {' | '.join(cells)} |"


FIRST_HEAD = "| streams | pairs | first token, ms later | at most 1 |\n| --- | --- | --- | --- |"
FIRST_TARGET_MS = 1.0


def first_row(num_streams: int, num_pairs: int) -> str:
    """What the front door adds to the first token while so many streams are open."""
    wire = Wire(REQUEST, HEAD, CHUNK, LAST)
    port, frontend = _free_port(), _free_port()
    command = ["-m", "worker.frontdoor", "--port", str(port), "--upstream", f"http://127.0.0.1:{frontend}"]
    process = subprocess.Popen([sys.executable, *command], env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    cores = os.sched_getaffinity(0)
    try:
        _await_connection(port, process)
        pin(process.pid, 1)
        pin(0, 0)
        found = uvloop.run(measure_first(port, frontend, wire, num_streams, num_pairs))
    finally:
        os.sched_setaffinity(0, cores)
        process.kill()
        process.wait()
    median, low, high = (value * 1e3 for value in interval(found))
    verdict = "yes" if high <= FIRST_TARGET_MS else "no"
    return f"| {num_streams} | {num_pairs} | {median:+.2f} ({low:+.2f} to {high:+.2f}) | {verdict} |"


TABLE_HEAD = (
    "| streams | request, front door | relay | difference | event, front door | relay | difference |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def report(rows: Sequence[str], first_rows: Sequence[str], num_rounds: int) -> str:
    return f"""# What the front door costs

Made by `.venv/bin/python benchmarks/front_door.py`, which says what is compared. CPU time of the server's process in
microseconds, per request with its connection and the ends of its answer, and per event: medians of {num_rounds}
rounds in turn. The relay checks nothing; what it costs is sockets and event loop.

{TABLE_HEAD}
{chr(10).join(rows)}

Added to the time to first token, as `benchmarks/front_door_first.py` says: open-loop load, the front door on a core
of its own; the median of pairs, one through the front door and one straight to the frontend, and its interval of
95 % by bootstrap.

{FIRST_HEAD}
{chr(10).join(first_rows)}

{datetime.date.today().isoformat()}, {processor_name()}, {os.cpu_count()} cores; load average {os.getloadavg()[1]:.1f};
Python {platform.python_version()}, uvloop {importlib.metadata.version("uvloop")}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="What the front door costs per request and per event.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--events", type=int, default=64, help="events per answer")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=1500, help="pairs of requests, for the first token")
    parser.add_argument("--parts", nargs="+", choices=("cpu", "first"), default=["cpu", "first"])
    parser.add_argument("--no-write", action="store_true", help="leave results/front_door.md as it is")
    parser.add_argument("--serve-relay", type=int, nargs=2, metavar=("PORT", "FRONTEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_relay:
        uvloop.run(serve_relay(*options.serve_relay))
        return
    end_on_sigterm()
    rows = _cpu_rows(options) if "cpu" in options.parts else []
    first_rows = []
    if "first" in options.parts:
        print(FIRST_HEAD, flush=True)
        for num_streams in options.streams:
            first_rows.append(first_row(num_streams, options.pairs))
            print(first_rows[-1], flush=True)
    if not options.no_write and rows and first_rows:
        REPORT.write_text(report(rows, first_rows, options.rounds), encoding="utf-8")
        print(f"\nwritten to {REPORT.relative_to(HERE.parent)}")


def _cpu_rows(options: argparse.Namespace) -> list[str]:
    rows = []
    with running(DOOR) as door, running(RELAY) as relay:
        servers = {DOOR: door, RELAY: relay}
        print(TABLE_HEAD, flush=True)
        for num_streams in options.streams:
            costs: dict[str, list[Cost]] = {name: [] for name in servers}
            for server in servers.values():
                measure(server, num_streams, options.events)  # warm-up
            for _ in range(options.rounds):
                for name, server in servers.items():
                    costs[name].append(measure(server, num_streams, options.events))
            rows.append(row(num_streams, costs))
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
