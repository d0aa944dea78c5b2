"""Decoding throughput of the engine and its peers while other processes use the same cores.

    benchmarks/peers.sh llama                            # once: the environment for llama.cpp
    .venv/bin/python benchmarks/neighbours.py            # a quarter of an hour

A frontend, a client or another worker always shares a machine somewhere. A neighbour here is a
process in a busy loop. All peers decode the same random Llama of about 125 M parameters on as many
threads as there are cores, with no neighbour, with one, and with one for each core; peers take
turns, and only the one that is measured runs. The median of the rounds counts. Prints each round
and writes `results/neighbours.md`.

Peers: our engine with default settings; our engine with GNU OpenMP's own spin count, the former
default; transformers' `generate`; llama.cpp, whose matrices stay in bfloat16 and which has its own
threads.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint import write_checkpoint
from decode import Answer
from machine import processor_name
from serve import end_on_sigterm
from workload import HERE, Task, peer

REPORT = HERE / "results" / "neighbours.md"
OURS, SPINNING, TRANSFORMERS, LLAMA = "ours", "ours, spinning as OpenMP does", "transformers", "llama.cpp"
OPENMP_SPIN_COUNT = "300000"
NEIGHBOUR = "while True: pass"
LEAST_OF_CALM = 0.35
"""What is aimed at, with a neighbour for each core."""

Speeds = dict[tuple[str, int, int], list[float]]
"""Tokens per second of each round, by who answered, rows and neighbours."""


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """As many processes that compute without end."""
    running = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def contenders(arguments: argparse.Namespace, checkpoint: Path) -> Iterator[dict[str, Answer]]:
    """Everybody, each in a process of its own."""
    here, threads = Path(sys.executable), arguments.threads
    with contextlib.ExitStack() as stack:

        def start(python: Path, script: str, *more: str, **environ: Any) -> Answer:
            return stack.enter_context(peer(python, checkpoint, threads, script, *more, **environ))

        answers = {OURS: start(here, "decode_ours.py", arguments.dtype)}
        answers[SPINNING] = start(here, "decode_ours.py", arguments.dtype, GOMP_SPINCOUNT=OPENMP_SPIN_COUNT)
        answers[TRANSFORMERS] = start(here, "decode_transformers.py", "static", arguments.dtype)
        if arguments.llama.is_file():
            answers[LLAMA] = start(arguments.llama, "decode_llama.py")
        else:
            print("llama.cpp: not installed (benchmarks/peers.sh llama installs it)")
        yield answers


def measure(answers: dict[str, Answer], arguments: argparse.Namespace) -> Speeds:
    """The speeds of steps in which every row decodes."""
    speeds: Speeds = {}
    for rows in arguments.rows:
        for answer in answers.values():
            answer(Task(rows, 32, 4, "greedy", -1))
        for number in range(arguments.rounds):
            for count in arguments.neighbours:
                for name, answer in answers.items():
                    with neighbours(count):
                        reply = answer(Task(rows, 32, arguments.new, "greedy", number))
                    speed = reply.decode_tokens / reply.decode_s
                    speeds.setdefault((name, rows, count), []).append(speed)
                    print(f"  {rows} rows, {count} neighbours: {name}: {speed:.1f} tokens/s", flush=True)
    return speeds


def render(speeds: Speeds, arguments: argparse.Namespace, load: float) -> str:
    """`results/neighbours.md`."""
    middle = {key: statistics.median(each) for key, each in speeds.items()}
    names = list(dict.fromkeys(name for name, _, _ in middle))
    counts = arguments.neighbours
    lines = [
        "# Decoding beside busy neighbours",
        "",
        "Made by `.venv/bin/python benchmarks/neighbours.py`, which says who answers. Tokens per second, the median of",
        f"{arguments.rounds} rounds, {arguments.threads} threads on {os.cpu_count()} cores.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, {processor_name()}, {arguments.dtype}, "
        f"load before {load:.1f}.",
        "",
        "| rows | neighbours | " + " | ".join(names) + " |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for rows in arguments.rows:
        for count in counts:
            lines.append(f"| {rows} | {count} | " + " | ".join(f"{middle[n, rows, count]:.1f}" for n in names) + " |")
    titles = [f"ours / {name}" for name in names if name != OURS]
    lines += ["", "Ratios:", "", f"| rows | neighbours | ours / ours without them (>= {LEAST_OF_CALM}) | "]
    lines[-1] += " | ".join(titles) + " |"
    lines.append("| --- | --- | --- |" + " --- |" * len(titles))
    for rows in arguments.rows:
        for count in counts:
            ours = middle[OURS, rows, count]
            ratios = [ours / middle[OURS, rows, 0], *(ours / middle[n, rows, count] for n in names if n != OURS)]
            lines.append(f"| {rows} | {count} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = os.cpu_count() or 1
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0, 1, cores], help="0 must be among them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--llama", type=Path, default=HERE.parent / ".venv-llama/bin/python")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    return parser.parse_args()


def main() -> None:
    arguments = _parse()
    end_on_sigterm()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory)
        write_checkpoint(checkpoint)
        with contenders(arguments, checkpoint) as answers:
            speeds = measure(answers, arguments)
    report = render(speeds, arguments, load)
    if not arguments.no_results:
        REPORT.write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
