"""Processor time, memory and sockets that each part of a fleet takes: front door, Dynamo's frontend
and worker.

    .venv/bin/python benchmarks/parts.py

The worker's engine is ``--engine constant``: a forward pass that sleeps, so that what is counted is
the way of a request and of its tokens. Each part is a process, and the time is its own processor
time as the kernel counts it, which other work on the machine lengthens little. Requests with short
and long answers are driven in turn; two lengths give the time of a request and that of a token:
the line through the medians over rounds. From them follow the requests of 128 tokens that one core
of the part serves in a second. Memory and sockets are those of streams that are open at the same
time, above those of none. Prints a table, and keeps it in `results/parts.md`, its numbers in
`results/parts.json`, which `docs/scale.md` and planning start from.

Peer: Dynamo's frontend, beside which the front door's share is given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from fleet_model import ANSWER
from fleet_plan import DOOR, FRONTEND
from machine import processor_name
from serve import HERE, _free_port, await_models, end, end_on_sigterm, environment, stream_completion

from worker.tiny_model import write_tiny_model

MODEL = "constant"
SHORT, LONG = 1, 129
"""Tokens of the two kinds of answers."""

START_S = 120
"""Seconds until all workers must have started."""

WORKER, STORED = "worker", "worker, with migration"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one part takes.

    Attributes:
        part: Name of the part.
        streams: Streams at the same time.
        request_us: Microseconds of processor time for a request without its tokens.
        token_us: Microseconds of processor time for a token.
    """

    part: str
    streams: int
    request_us: float
    token_us: float

    @property
    def requests_per_s(self) -> float:
        """Requests of `ANSWER` tokens that one core serves in a second."""
        return 1e6 / (self.request_us + ANSWER * self.token_us)


@dataclass(frozen=True, slots=True)
class Held:
    """What an open stream holds in one part: KiB of resident memory, and file descriptors."""

    part: str
    memory_kib: float
    descriptors: float


class Stack:
    """Processes on loopback: a front door, a frontend, `count` workers, and one with migration."""

    def __init__(self, directory: Path, step_s: float, slots: int, count: int) -> None:
        self._directory = directory
        self.frontend_port, self.door_port = _free_port(), _free_port()
        model = write_tiny_model(directory / "model")
        environ = environment(directory) | {
            "DYN_LOG": "off",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "WORKER_MODEL_PATH": str(model),
        }
        worker = [
            "-m",
            "worker",
            "--engine",
            "constant",
            "--constant-step-s",
            str(step_s),
            "--max-num-seqs",
            str(slots),
        ]
        store = f"file:{directory / 'store'}"
        commands = {
            FRONTEND: ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.frontend_port)],
            DOOR: [
                *("-m", "worker.frontdoor", "--port", str(self.door_port)),
                *("--upstream", f"http://127.0.0.1:{self.frontend_port}"),
            ],
            WORKER: [*worker, "--served-model-name", MODEL, "--component", "plain"],
            **{
                f"{WORKER} {number}": [*worker, "--served-model-name", MODEL, "--component", "plain"]
                for number in range(1, count)
            },
            STORED: [
                *(*worker, "--served-model-name", f"{MODEL}-stored", "--component", "stored"),
                *("--migration", "on", "--boundary-store", store),
            ],
        }
        self.processes = {
            part: subprocess.Popen([sys.executable, *command], env=environ) for part, command in commands.items()
        }

    def await_workers(self, count: int) -> None:
        """Until so many are registered: the model is served as soon as one is."""
        instances = self._directory / "discovery" / "v1" / "instances"
        deadline = time.monotonic() + START_S
        while len(list(instances.glob("*%2Fplain%2Fgenerate%2F*"))) < count:
            if time.monotonic() > deadline:
                raise SystemExit("parts: the workers did not start")
            time.sleep(0.1)
        time.sleep(1)  # the frontend has heard of them

    def family(self, part: str) -> list[psutil.Process]:
        """The process and its children."""
        process = psutil.Process(self.processes[part].pid)
        return [process, *process.children(recursive=True)]

    def processor_s(self, part: str) -> float:
        """Seconds of processor time so far."""
        return float(sum(each.cpu_times().user + each.cpu_times().system for each in self.family(part)))

    def held(self, part: str) -> tuple[int, int]:
        """Bytes of resident memory, and open file descriptors."""
        family = self.family(part)
        return sum(each.memory_info().rss for each in family), sum(each.num_fds() for each in family)

    def end(self) -> None:
        """The frontend ends last."""
        end(reversed(self.processes.values()))


@contextlib.contextmanager
def running(directory: Path, step_s: float, slots: int = 256, count: int = 1) -> Iterator[Stack]:
    stack = Stack(directory, step_s, slots, count)
    try:
        await_models(stack.door_port, {MODEL, f"{MODEL}-stored"}, stack.processes.values())
        stack.await_workers(count)
        yield stack
    finally:
        stack.end()


async def drive(stack: Stack, model: str, num_streams: int, num_tokens: int, num_requests: int) -> None:
    """`num_requests` requests by as many clients as there are streams."""
    left = iter(range(num_requests))

    async def client() -> None:
        for _ in left:
            await stream_completion(stack.door_port, model, num_tokens)

    await asyncio.gather(*(client() for _ in range(num_streams)))


def seconds_per_request(
    stack: Stack, model: str, num_streams: int, num_tokens: int, num_requests: int
) -> dict[str, float]:
    """Processor time of each part, divided by the requests."""
    before = {part: stack.processor_s(part) for part in stack.processes}
    uvloop.run(drive(stack, model, num_streams, num_tokens, num_requests))
    return {part: (stack.processor_s(part) - before[part]) / num_requests for part in stack.processes}


def costs(stack: Stack, num_streams: int, rounds: int, num_requests: int) -> list[Cost]:
    """The cost of each part with that many streams."""
    found = []
    for model, parts in ((MODEL, (DOOR, FRONTEND, WORKER)), (f"{MODEL}-stored", (STORED,))):
        uvloop.run(drive(stack, model, num_streams, SHORT, num_streams))  # warm-up
        taken: dict[int, list[dict[str, float]]] = {SHORT: [], LONG: []}
        for _ in range(rounds):
            for num_tokens, ones in taken.items():
                ones.append(seconds_per_request(stack, model, num_streams, num_tokens, num_requests))
        for part in parts:
            short, long = (statistics.median(one[part] for one in taken[length]) for length in (SHORT, LONG))
            token_s = (long - short) / (LONG - SHORT)
            found.append(Cost(part, num_streams, (short - SHORT * token_s) * 1e6, token_s * 1e6))
    return found


def held_by_streams(stack: Stack, num_streams: int) -> list[Held]:
    """What open streams hold in each part: half of them through either worker."""

    async def look() -> list[Held]:
        before = {part: stack.held(part) for part in stack.processes}
        models = (MODEL, f"{MODEL}-stored")
        tasks = [
            asyncio.create_task(stream_completion(stack.door_port, model, 10_000))
            for model in models
            for _ in range(num_streams // 2)
        ]
        await asyncio.sleep(10)
        after = {part: stack.held(part) for part in stack.processes}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        counts = dict.fromkeys(stack.processes, num_streams) | {WORKER: num_streams // 2, STORED: num_streams // 2}
        grown = {part: [b - a for a, b in zip(before[part], after[part], strict=True)] for part in counts}
        return [Held(part, grown[part][0] / 1024 / count, grown[part][1] / count) for part, count in counts.items()]

    return uvloop.run(look())


HEAD = """| part | streams | µs a request | µs a token | requests/s a core, of 128 tokens | beside Dynamo's frontend |
| --- | --- | --- | --- | --- | --- |"""


def rows(found: Sequence[Cost]) -> list[str]:
    frontends = {one.streams: one.requests_per_s for one in found if one.part == FRONTEND}
    return [
        f"| {one.part} | {one.streams} | {one.request_us:,.0f} | {one.token_us:,.1f} | {one.requests_per_s:,.0f} "
        f"| {one.requests_per_s / frontends[one.streams]:.2f} |"
        for one in found
    ]


def report(found: Sequence[Cost], held: Sequence[Held], num_held: int, rounds: int) -> str:
    lines = "\n".join(f"| {one.part} | {one.memory_kib:,.0f} | {one.descriptors:.2f} |" for one in held)
    return f"""# What each part of a fleet takes

Made by `.venv/bin/python benchmarks/parts.py`, which says what is measured: processor time of each process, medians of
{rounds} rounds, through the front door. The engine computes nothing.

{HEAD}
{chr(10).join(rows(found))}

With {num_held} streams open, one of them takes:

| part | KiB of memory | file descriptors |
| --- | --- | --- |
{lines}

{datetime.date.today().isoformat()}, {processor_name()}, {os.cpu_count()} cores; load average {os.getloadavg()[1]:.1f}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time, memory and sockets of each part of a fleet.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of each round and length")
    parser.add_argument("--held", type=int, default=256, help="streams that are open while memory is looked at")
    parser.add_argument("--no-write", action="store_true", help="leave results/parts.* as they are")
    options = parser.parse_args()
    end_on_sigterm()
    found: list[Cost] = []
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), 0.001) as stack:
        print(HEAD, flush=True)
        for num_streams in options.streams:
            some = costs(stack, num_streams, options.rounds, options.requests)
            found += some
            print("\n".join(rows(some)), flush=True)
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), 0.5) as stack:
        held = held_by_streams(stack, options.held)
    text = report(found, held, options.held, options.rounds)
    print(text)
    if not options.no_write:
        results = HERE / "results"
        (results / "parts.md").write_text(text, encoding="utf-8")
        kept = {"costs": [asdict(one) for one in found], "held": [asdict(one) for one in held]}
        (results / "parts.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
