"""From the command to a worker that takes requests: with a packed copy, and without.

    .venv/bin/python benchmarks/start.py [--rounds 5]

Starts ``python -m worker`` on the default model as ``launch/agg.sh`` serves it, without the
frontend, until it is registered; once with the packed copy of an earlier start, once with
``--packed-copy off``. Of the offline engine, the call ``Engine(...)`` alone, behind the imports.
Beside them a process that imports torch, nothing else, and ends; transformers, in a process that
loads the same weights, bfloat16, and the tokenizer; and, where `peers.sh` made its environment,
llama.cpp, in a process that maps the GGUF file. They take turns; the table of medians is kept in
`results/start.md`. The second start is to take at most 1.2 s, and ``Engine(...)`` 0.6 s.
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
import time
from collections.abc import Callable
from pathlib import Path

from machine import processor_name
from serve import end_on_sigterm

from worker.models import model_cache, prepare_default_model
from worker.models.default_model import fetch_default_gguf

HERE = Path(__file__).resolve().parent
TARGET_S, ENGINE_TARGET_S = 1.2, 0.6
TIMEOUT_S = 120.0
SECOND, WITHOUT, ENGINE = "ours, second start", "ours, without a copy", "ours, `Engine(...)`"
TORCH, TRANSFORMERS, LLAMA = "`import torch`", "transformers", "llama.cpp"

LOOPBACK = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
    "DYN_LOG": "error",
    "HF_HUB_OFFLINE": "1",
}

LOAD_ENGINE = """
import sys, time
from worker.engines.embedded import Engine
began = time.perf_counter()
Engine(sys.argv[1], dtype="float32")
print(time.perf_counter() - began)
"""
LOAD_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
"""
LOAD_LLAMA = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], verbose=False)"


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr)


def start_worker(model: Path, *arguments: str) -> float:
    """Seconds until the worker is registered."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | LOOPBACK | {"DYN_FILE_KV": directory}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile the package again
        began = time.perf_counter()
        command = [sys.executable, "-m", "worker", "--model-path", str(model), "--drain-timeout-s", "1", *arguments]
        worker = subprocess.Popen(command, env=environment, cwd=HERE.parent)
        try:
            while not any(path.is_file() for path in Path(directory).glob("v1/mdc/**/*")):
                if worker.poll() is not None or time.perf_counter() - began > TIMEOUT_S:
                    raise SystemExit(f"the worker did not start: {' '.join(command)}")
                time.sleep(0.005)
            return time.perf_counter() - began
        finally:
            worker.kill()
            worker.wait()


def run(*command: str) -> float:
    """Seconds that a process takes."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def load_engine(model: Path) -> float:
    """Seconds that ``Engine(...)`` takes in a new process."""
    command = [sys.executable, "-c", LOAD_ENGINE, str(model)]
    return float(subprocess.check_output(command, cwd=HERE.parent, stderr=subprocess.DEVNULL))


def main() -> None:
    parser = argparse.ArgumentParser(description="From the command to a worker that takes requests.")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each (default: 5)")
    parser.add_argument("--no-write", action="store_true", help="leave results/start.md as it is")
    arguments = parser.parse_args()
    end_on_sigterm()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        quantised = prepare_default_model(model_cache(), say, keeps_blocks=True)
        dense = prepare_default_model(model_cache(), say)
        ways: dict[str, Callable[[], float]] = {
            SECOND: lambda: start_worker(quantised, "--dtype", "float32"),
            WITHOUT: lambda: start_worker(quantised, "--dtype", "float32", "--packed-copy", "off"),
            ENGINE: lambda: load_engine(quantised),
            TORCH: lambda: run(sys.executable, "-c", "import torch"),
            TRANSFORMERS: lambda: run(sys.executable, "-c", LOAD_TRANSFORMERS, str(dense)),
        }
        python = HERE.parent / ".venv-llama/bin/python"
        if python.exists():
            file = fetch_default_gguf(directory, say)
            ways[LLAMA] = lambda: run(str(python), "-c", LOAD_LLAMA, str(file))
        for way in ways.values():
            way()  # the first start keeps the copy; files are in the page cache
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                seconds[name].append(way())
    report = table({name: statistics.median(each) for name, each in seconds.items()}, arguments.rounds)
    print(report)
    if not arguments.no_write:
        (HERE / "results/start.md").write_text(report, encoding="utf-8")


def table(medians: dict[str, float], rounds: int) -> str:
    """The report."""
    verdict, of_engine = (
        "met" if medians[who] <= target else "missed" for who, target in ((SECOND, TARGET_S), (ENGINE, ENGINE_TARGET_S))
    )
    lines = [
        "# How long a start takes",
        "",
        "Made by `.venv/bin/python benchmarks/start.py`, which says what is compared. Median of "
        f"{rounds} rounds, {datetime.date.today()}, {processor_name()}, {os.cpu_count()} CPUs.",
        "",
        f"The second start takes {medians[SECOND]:.1f} s, target {TARGET_S:g}: {verdict}. "
        f"`Engine(...)` takes {medians[ENGINE]:.2f} s, target {ENGINE_TARGET_S:g}: {of_engine}.",
        "",
        "| who | seconds | of ours, second start |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {each:.2f} | {each / medians[SECOND]:.2f} |" for name, each in medians.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
