"""Quantised weights of the default model against llama.cpp, OpenVINO, ONNX Runtime and CTranslate2.

    benchmarks/peers.sh llama openvino onnxruntime ctranslate2  # once
    .venv/bin/python benchmarks/quantised.py  # twenty minutes on a machine that does nothing else
    .venv/bin/python benchmarks/quantised.py --formats Q8_0 --cases 1 8 --no-results
    .venv/bin/python benchmarks/quantised.py --model large --formats Q4_1 --rounds 1 --no-results

Prints, and writes `results/quantised.md`. ``Q4_1`` is the file as the package index has it;
llama.cpp makes the others of it. Ours, llama.cpp and OpenVINO read that file and keep its blocks
packed. ONNX Runtime GenAI and CTranslate2 quantise the file's values again, with their own tools,
to as many bits: ONNX Runtime in groups of 32, with zero points for ``Q4_1``; CTranslate2 to 8 bits
only, with one scale per row. A peer that has no such format is not in the row. A ratio is of ours
to the fastest peer.

Ours has exact numerics in all columns. ``float32`` is `--activation-dtype none`, all sums in
float32. ``float32, int8 activations`` is what the launch scripts serve: the peers, too, round
activations to 8 bits, in groups of 32 or, in CTranslate2, whole rows, and multiply integers.
``bfloat16 activations`` need AMX. ``bfloat16`` is beside that what OpenVINO computes all else in
where the processor has it, as it does by default; its KV cache has 8 bits. llama.cpp's is float16,
with flash attention; ONNX Runtime's and CTranslate2's are float32.

Cases: ``1``, ``8``, ``32`` are as many prompts of 64 tokens and 64 new tokens each, greedy; what
counts is the time in which all of them decode. ``prompt`` is one prompt of 1,024 tokens and the
time to its first token. Rounds are interleaved, in another order each time; the fastest one of each
counts. The first new tokens of a peer are compared with those of ``float32``, to see that it
computes the same model; prompts are random tokens, after which no token is much likelier than the
next, so that rounding alone changes some. In ``Q4_1``, ONNX Runtime's zero points are integers and
the file's are not: its weights are rounded to 4 bits a second time, and many differ.

``--model large`` is a random Llama of 1.2 B parameters with the tokenizer and the formats of that
file, and 16 new tokens instead of 64; after random weights even fewer tokens are alike.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import decode_ours  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import torch
from decode import read_speed
from large_gguf import NAME as LARGE_MODEL
from large_gguf import write_large_gguf
from machine import processor_name
from workload import HERE, LONGEST, MOST_ROWS, Reply, Task, peer

from worker.engines.embedded import Engine, native
from worker.models import model_cache
from worker.models.checkpoint import convert_gguf
from worker.models.default_model import DEFAULT_MODEL, fetch_default_gguf

REPORT = HERE / "results" / "quantised.md"
OWN = "Q4_1"
"""The format of the file that the package index has."""
FORMATS = (OWN, "Q4_0", "Q8_0")
MODELS = {"default": DEFAULT_MODEL, "large": LARGE_MODEL}
"""Names of models by the argument that chooses one."""
LARGE_NEW = 16
"""New tokens of the large model, at most."""
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


def write_formats(directory: Path, formats: list[str], python: Path, model: str = "default") -> dict[str, Path]:
    """GGUF files of a model, by format."""
    own = fetch_default_gguf(directory, say)
    if model == "large":
        own = write_large_gguf(own, directory / f"{LARGE_MODEL}.gguf")
    found = {}
    for form in formats:
        found[form] = own if form == OWN else directory / f"{MODELS[model]}.{form}.gguf"
        if form != OWN:
            command = list(map(str, (python, HERE / "quantise_llama.py", own, found[form], form)))
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return found


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is compared with.

    Attributes:
        environment: As `peers.sh` calls it.
        script: What drives it there.
        formats: What it answers in.
        reads_gguf: It reads the file; otherwise it quantises the checkpoint of its values itself.
    """

    environment: str
    script: str
    formats: tuple[str, ...] = FORMATS
    reads_gguf: bool = True


PEERS = {
    "llama.cpp": Peer("llama", "decode_llama.py"),
    "OpenVINO": Peer("openvino", "decode_openvino.py"),
    "ONNX Runtime": Peer("onnxruntime", "decode_onnxruntime.py", reads_gguf=False),
    "CTranslate2": Peer("ctranslate2", "decode_ctranslate2.py", ("Q8_0",), reads_gguf=False),
}
EXACT = "float32"
OURS = {
    EXACT: ("float32", "none"),
    "float32, int8 activations": ("float32", "int8"),
    "bfloat16, int8 activations": ("bfloat16", "int8"),
}
"""`EmbeddedConfig.dtype` and `activation_dtype`, by the name of a column."""
if native.no_bfloat16_rows() is None:
    for each in ("float32", "bfloat16"):
        OURS[f"{each}, bfloat16 activations"] = (each, "bfloat16")
FLOOR = "floor"
"""Tokens per second if each step did nothing but read the file once, as fast as torch reads memory;
not for prompts.
"""
KV_BLOCKS = 600
"""About twice what the largest case fills: a server that has run for a while has written to all of
its pages, which the system clears the first time.
"""


@dataclass(slots=True)
class Row:
    """A case in a format.

    Attributes:
        best: Tokens per second of the fastest round, by who answered, and of `FLOOR`.
        alike: Of each answer whether its first token is that of `EXACT`, by who answered.
    """

    form: str
    case: str
    best: dict[str, float] = field(default_factory=dict)
    alike: dict[str, list[bool]] = field(default_factory=dict)


def measure(row: Row, task: Task, answers: Mapping[str, Callable[[Task], Reply]], rounds: int, size: int) -> None:
    """Fill in a row, of tasks like `task` and a model of `size` bytes."""
    for number in range(-1, rounds):  # one turn that does not count
        first = {}
        if row.case != "prompt":
            row.best[FLOOR] = max(row.best.get(FLOOR, 0.0), task.rows * read_speed() / size)
        for name, answer in list(answers.items())[:: 1 if number % 2 else -1]:
            found, first[name] = turn(answer, replace(task, seed=number))
            row.best[name] = max(row.best.get(name, 0.0), found) if number >= 0 else 0.0
        for name, tokens in first.items():
            row.alike.setdefault(name, []).extend(map(int.__eq__, tokens, first[EXACT]))


def turn(answer: Callable[[Task], Reply], task: Task) -> tuple[float, list[int]]:
    """Tokens per second of one turn, of the prompt if one token is wanted, and the first token of
    each answer.
    """
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    reply = answer(task)
    elapsed = time.perf_counter() - started
    if reply.num_tokens != task.rows * task.new:
        raise SystemExit(f"{reply.num_tokens} tokens came, {task.rows * task.new} were asked for")
    return task.prompt / elapsed if task.new == 1 else reply.decode_tokens / reply.decode_s, reply.first


def render(rows: list[Row], load: float, arguments: argparse.Namespace) -> str:
    """The document."""
    peers = arguments.peers
    lines = [
        "# Quantised weights",
        "",
        f"Made by `benchmarks/quantised.py`, which says what the cases are, on {datetime.date.today()}:",
        f"{MODELS[arguments.model]}, --kernels {arguments.kernels}, {processor_name()}, {arguments.threads} threads,",
        f"load before {load:.1f}; the fastest of {arguments.rounds} interleaved rounds, tokens per second.",
        "",
        *table("format", "case", FLOOR, *peers, *(title for name in OURS for title in (name, "ratio"))),
    ]
    for row in rows:
        fastest = max((row.best[name] for name in peers if name in row.best), default=None)
        cells = [f"{row.best[name]:.0f}" if name in row.best else "-" for name in (FLOOR, *peers)]
        for name in OURS:
            cells += [f"{row.best[name]:.0f}", f"{row.best[name] / fastest:.2f}" if fastest else "-"]
        lines.append(f"| {row.form} | {row.case} | {' | '.join(cells)} |")
    compared = [*peers, *(name for name in OURS if name != EXACT)]
    lines += ["", f"Answers whose first token is that of {EXACT}, in per cent:", "", *table("format", *compared)]
    for form in arguments.formats:
        cells = []
        for name in compared:
            alike = [each for row in rows if row.form == form for each in row.alike.get(name, [])]
            cells.append(f"{100 * sum(alike) / len(alike):.0f}" if alike else "-")
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(*titles: str) -> list[str]:
    """Its head."""
    return [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]


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
        speculative_config=decode_ours.NO_DRAFTS,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = HERE.parent
    parser.add_argument("--model", choices=MODELS, default="default")
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
    pythons = {name: arguments.environments / f".venv-{each.environment}/bin/python" for name, each in PEERS.items()}
    for name in {"llama.cpp", *arguments.peers}:
        if not pythons[name].is_file():
            raise SystemExit(f"{name} is not installed; benchmarks/peers.sh {PEERS[name].environment} installs it")
    load = os.getloadavg()[0]
    torch.set_num_threads(arguments.threads)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        files = write_formats(Path(directory), arguments.formats, pythons["llama.cpp"], arguments.model)
        for form, path in files.items():
            cache = model_cache(os.environ) if arguments.model == "default" else Path(directory)
            checkpoint = convert_gguf(path, cache, say, keeps_blocks=True)
            engines = {name: engine_of(checkpoint, name, arguments) for name in OURS}
            with contextlib.ExitStack() as stack:
                answers: dict[str, Callable[[Task], Reply]] = {
                    name: functools.partial(decode_ours.answer, engine) for name, engine in engines.items()
                }
                for name in arguments.peers:
                    theirs = PEERS[name]
                    if form not in theirs.formats:
                        continue
                    source = path if theirs.reads_gguf else convert_gguf(path, Path(directory), say)
                    process = peer(pythons[name], source, arguments.threads, theirs.script, form)
                    answers[name] = stack.enter_context(process)
                for case in arguments.cases:
                    row = Row(form, case)
                    task = CASES[case]
                    if arguments.model == "large":
                        task = replace(task, new=min(task.new, LARGE_NEW))
                    measure(row, task, answers, arguments.rounds, path.stat().st_size)
                    rows.append(row)
                    print(form, case, {name: round(found) for name, found in row.best.items()}, flush=True)
    text = render(rows, load, arguments)
    print(text)
    if not arguments.no_results:
        arguments.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
