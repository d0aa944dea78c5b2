"""Quantised weights against llama.cpp and OpenVINO: the default model, the same GGUF file for all.

    benchmarks/peers.sh llama openvino        # once
    .venv/bin/python benchmarks/quantised.py  # ten minutes on a machine that does nothing else
    .venv/bin/python benchmarks/quantised.py --formats Q8_0 --cases 1 8 --no-results

Prints, and writes `results/quantised.md`. ``Q4_1`` is the file as the package index has it;
llama.cpp makes the others of it. All keep the blocks packed. A ratio is of ours to the faster peer.

Ours has exact numerics in all columns. ``float32`` is what the launch scripts serve, all sums in
float32. ``int8 activations`` is `--activation-dtype int8`: the peers, too, round activations to 8
bits in groups of 32 and multiply integers. ``bfloat16`` is beside that what OpenVINO computes all
else in where the processor has it, as it does by default; its KV cache has 8 bits. llama.cpp's
is float16.

Cases: ``1``, ``8``, ``32`` are as many prompts of 64 tokens and 64 new tokens each, greedy; what
counts is the time in which all of them decode. ``prompt`` is one prompt of 1,024 tokens and the
time to its first token. Rounds are interleaved, in another order each time; the fastest one of each
counts.

`results/quantised_avx2.md` compares with a llama.cpp that was built without AVX-512, in another
copy of this repository, by
``CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" benchmarks/peers.sh
llama``: ``--kernels native-avx2 --peers llama.cpp --environments COPY --report
benchmarks/results/quantised_avx2.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import decode_ours  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import torch
from workload import HERE, LONGEST, MOST_ROWS, Reply, Task, peer

from worker.engines.embedded import Engine
from worker.models import model_cache
from worker.models.checkpoint import convert_gguf
from worker.models.default_model import DEFAULT_MODEL, fetch_default_gguf

REPORT = HERE / "results" / "quantised.md"
OWN = "Q4_1"
"""The format of the file that the package index has."""
FORMATS = (OWN, "Q4_0", "Q8_0")
CASES = {
    "1": Task(1, 64, 64, "greedy", 0),
    "8": Task(8, 64, 64, "greedy", 0),
    "32": Task(32, 64, 64, "greedy", 0),
    "prompt": Task(1, 1024, 1, "greedy", 0),
}
PAUSE_S = 0.3
"""Between two turns, so that threads that wait busily for more work have gone to sleep."""


def say(text: str) -> None:
    """What takes long, to standard error."""
    print(text, file=sys.stderr)


def write_formats(directory: Path, formats: list[str], python: Path) -> dict[str, Path]:
    """GGUF files of the default model, by format."""
    own = fetch_default_gguf(directory, say)
    found = {}
    for form in formats:
        found[form] = own if form == OWN else directory / f"{DEFAULT_MODEL}.{form}.gguf"
        if form != OWN:
            command = [python, HERE / "quantise_llama.py", own, found[form], form]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return found


def speed(answer: Callable[[Task], Reply], case: str, number: int) -> float:
    """Tokens per second of one turn."""
    shape = CASES[case]
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    reply = answer(Task(shape.rows, shape.prompt, shape.new, shape.controls, number))
    elapsed = time.perf_counter() - started
    return shape.prompt / elapsed if case == "prompt" else reply.decode_tokens / reply.decode_s


PEERS = {"llama.cpp": ("llama", "decode_llama.py"), "OpenVINO": ("openvino", "decode_openvino.py")}
"""As `peers.sh` calls them, and what drives them there."""
OURS = {
    "float32": ("float32", "auto"),
    "float32, int8 activations": ("float32", "int8"),
    "bfloat16, int8 activations": ("bfloat16", "int8"),
}
"""`EmbeddedConfig.dtype` and `activation_dtype`, by the name of a column."""
KV_BLOCKS = 600
"""About twice what the largest case fills: a server that has run for a while has written to all of
its pages, which the system clears the first time.
"""


def render(rows: list[tuple[str, str, dict[str, float]]], load: float, arguments: argparse.Namespace) -> str:
    """The document."""
    lines = [
        "# Quantised weights",
        "",
        f"Made by `benchmarks/quantised.py`, which says what the cases are, on {datetime.date.today()}:",
        f"{DEFAULT_MODEL}, --kernels {arguments.kernels}, {platform.machine()}, {arguments.threads} threads,",
        f"load before {load:.1f}; the fastest of {arguments.rounds} interleaved rounds, tokens per second.",
        "",
        f"| format | case | {' | '.join(arguments.peers)} | {' | '.join(f'{name} | ratio' for name in OURS)} |",
        f"| --- | --- | {' | '.join('---' for _ in arguments.peers)} | {' | '.join('--- | ---' for _ in OURS)} |",
    ]
    for form, case, best in rows:
        theirs = [best[name] for name in arguments.peers]
        ours = " | ".join(f"{best[name]:.0f} | {best[name] / max(theirs):.2f}" for name in OURS)
        lines.append(f"| {form} | {case} | {' | '.join(f'{speed:.0f}' for speed in theirs)} | {ours} |")
    return "\n".join(lines) + "\n"


def engine_of(checkpoint: Path, column: str, arguments: argparse.Namespace) -> Engine:
    """Ours."""
    dtype, activation_dtype = OURS[column]
    return Engine(
        checkpoint,
        device="cpu",
        dtype=dtype,
        kernels=arguments.kernels,
        activation_dtype=activation_dtype,
        max_num_seqs=MOST_ROWS,
        context_length=LONGEST,
        kv_blocks=KV_BLOCKS,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = HERE.parent
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="as of the worker")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--environments", type=Path, default=root, help="where peers.sh made them")
    parser.add_argument("--report", type=Path, default=REPORT, help="the file to write")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    return parser.parse_args()


def main() -> None:
    arguments = _parse()
    pythons = {name: arguments.environments / f".venv-{PEERS[name][0]}/bin/python" for name in PEERS}
    for name in {"llama.cpp", *arguments.peers}:
        if not pythons[name].is_file():
            raise SystemExit(f"{name} is not installed; benchmarks/peers.sh {PEERS[name][0]} installs it")
    load = os.getloadavg()[0]
    torch.set_num_threads(arguments.threads)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for form, path in write_formats(Path(directory), arguments.formats, pythons["llama.cpp"]).items():
            checkpoint = convert_gguf(path, model_cache(os.environ), say, keeps_blocks=True)
            engines = {name: engine_of(checkpoint, name, arguments) for name in OURS}
            with contextlib.ExitStack() as stack:
                answers = {name: functools.partial(decode_ours.answer, engine) for name, engine in engines.items()}
                for name in arguments.peers:
                    script = PEERS[name][1]
                    answers[name] = stack.enter_context(peer(pythons[name], path, arguments.threads, script))
                for case in arguments.cases:
                    best = dict.fromkeys(answers, 0.0)
                    for number in range(-1, arguments.rounds):  # one turn that does not count
                        for name, answer in list(answers.items())[:: 1 if number % 2 else -1]:
                            found = speed(answer, case, number)
                            best[name] = max(best[name], found) if number >= 0 else 0.0
                    rows.append((form, case, best))
                    print(form, case, {name: round(found) for name, found in best.items()}, flush=True)
    text = render(rows, load, arguments)
    print(text)
    if not arguments.no_results:
        arguments.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
