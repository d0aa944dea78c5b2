"""Decoding throughput of the embedded engine and its peers, on a random and on the default model.

    benchmarks/peers.sh                                  # once: environments for vLLM and llama.cpp
    .venv/bin/python benchmarks/decode.py                # everything; an hour
    .venv/bin/python benchmarks/decode.py --models default --cases 1 8 --peers vllm --rounds 2

Prints each round, and writes `results/decode.md` from what this and earlier runs kept in
`results/decode.json`: a run replaces the cases that it measures. ``random`` is a Llama of 125 M
random parameters, ``default`` the model that the launch scripts serve. The weights are bfloat16.
All peers generate the same number of tokens on 2 threads; rounds of a case are interleaved, in
another order and with new prompts each time; the fastest round of each counts, since other work on
the machine can only make a round slower. Read the ratios, not the figures.

Cases:

- ``1``, ``8``, ``32``: as many prompts of 128 tokens, 128 new tokens each, greedy. The time
  includes prefill, as in the following cases.
- ``sampled``: 32 of them, with temperature, top-k, top-p and min-p.
- ``each8``, ``each32``: 8 and 32 of them, every request with its own temperature, top-k and top-p.
- ``context``: 32 prompts of 1024 tokens, 64 new tokens each, greedy; the time in which all of them
  decode.

Peers:

- ours: `worker.engines.embedded.Engine` with default settings, and with torch's kernels and fast
  numerics, against which exact numerics must not cost more than a tenth.
- transformers: `generate` on static batches; and its continuous batching.
- vLLM: its CPU build, compiled.
- llama.cpp: its Python package, with flash attention.
- floor: the time in which each step reads the weights once, as fast as this machine reads memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import decode_ours  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import torch
from checkpoint import write_checkpoint
from machine import processor_name
from workload import HERE, LONGEST, MOST_ROWS, Reply, Task, peer

from worker.engines.embedded import Engine
from worker.models import model_cache
from worker.models.default_model import DEFAULT_MODEL, prepare_default_model

KEPT, REPORT = HERE / "results" / "decode.json", HERE / "results" / "decode.md"
OURS = "ours"
FAST = "ours, torch's kernels, fast"
PEERS = {"vllm": "vLLM", "transformers": "transformers", "continuous": "transformers, continuous", "llama": "llama.cpp"}
TARGETS = {
    ("1", "vllm"): 1.0,
    ("8", "vllm"): 1.0,
    ("32", "vllm"): 1.0,
    ("sampled", "vllm"): 1.6,
    ("1", "transformers"): 1.5,
    ("8", "transformers"): 1.5,
    ("32", "transformers"): 1.5,
    ("context", "transformers"): 1.5,
    ("each8", "continuous"): 4.0,
    ("each32", "continuous"): 4.0,
}
"""Least ratio of ours to theirs that is aimed at, with random weights."""
EXACT_TARGET = 0.9
RANDOM = "random"
MODELS = {RANDOM: "A random Llama of 125 M parameters", "default": DEFAULT_MODEL}
PAUSE_S = 0.3
"""Between two turns, so that threads that wait busily for more work have gone to sleep."""

Answer = Callable[[Task], Reply]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, of whom."""

    rows: int
    prompt: int
    new: int
    controls: str
    peers: tuple[str, ...]
    decode_only: bool = False

    def task(self, seed: int) -> Task:
        return Task(self.rows, self.prompt, self.new, self.controls, seed)


CASES = {
    "1": Case(1, 128, 128, "greedy", tuple(PEERS)),
    "8": Case(8, 128, 128, "greedy", tuple(PEERS)),
    "32": Case(32, 128, 128, "greedy", tuple(PEERS)),
    "sampled": Case(32, 128, 128, "sampled", ("vllm",)),
    "each8": Case(8, 128, 128, "each", ("continuous", "vllm")),
    "each32": Case(32, 128, 128, "each", ("continuous", "vllm")),
    "context": Case(32, 1024, 64, "greedy", ("transformers",), decode_only=True),
}


@dataclass(slots=True)
class Measured:
    """A case as one run found it.

    Attributes:
        speeds: Tokens per second of each round, by who answered.
        alike: Part of the rows whose first token is ours, by who answered; sampled ones are not
            compared.
        numerics: What `OURS` computed with; see `Numerics.made_by`.
        absent: Peers whose environment is not there.
        load: Of the machine before the run, processes that ran or waited.
    """

    date: str
    machine: str
    floor_ms: float
    load: float
    numerics: str = ""
    speeds: dict[str, list[float]] = field(default_factory=dict)
    alike: dict[str, float] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def best(self, name: str) -> float:
        return max(self.speeds[name])


def ours(path: Path, **settings: Any) -> tuple[Answer, str]:
    """Our engine, and what it computes with."""
    settings |= {"max_num_seqs": MOST_ROWS, "context_length": LONGEST, "speculative_config": decode_ours.NO_DRAFTS}
    engine = Engine(path, device="cpu", **settings)
    return lambda task: decode_ours.answer(engine, task), decode_ours.made_by(engine)


def find_pythons(arguments: argparse.Namespace) -> dict[str, Path]:
    """The Python of each peer that is installed."""
    here = Path(sys.executable)
    pythons = {"vllm": arguments.vllm, "llama": arguments.llama, "transformers": here, "continuous": here}
    return {name: path for name, path in pythons.items() if path.is_file()}


@contextlib.contextmanager
def contenders(
    names: Sequence[str], pythons: dict[str, Path], checkpoint: Path, threads: int
) -> Iterator[dict[str, Answer]]:
    """Those of the peers `names` that are installed."""
    scripts = {
        "vllm": ("decode_vllm.py",),
        "llama": ("decode_llama.py",),
        "transformers": ("decode_transformers.py", "static"),
        "continuous": ("decode_transformers.py", "continuous"),
    }
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(peer(pythons[name], checkpoint, threads, *scripts[name]))
            for name in names
            if name in pythons
        }


def measure(case: Case, answers: dict[str, Answer], rounds: int, found: Measured) -> None:
    """Fill in speeds, after one short turn of everybody that does not count."""
    for answer in answers.values():
        answer(Task(case.rows, case.prompt, 4, case.controls, -1))
    order = list(answers.items())
    for number in range(rounds):
        first: dict[str, list[int]] = {}
        turn = number % len(order)
        for name, answer in order[turn:] + order[:turn]:
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            reply = answer(case.task(number))
            elapsed = time.perf_counter() - started
            if reply.num_tokens != case.rows * case.new:
                raise SystemExit(f"{name}: {reply.num_tokens} tokens came, {case.rows * case.new} were asked for")
            speed = reply.decode_tokens / reply.decode_s if case.decode_only else reply.num_tokens / elapsed
            found.speeds.setdefault(name, []).append(round(speed, 1))
            first[name] = reply.first
            print(f"  round {number}: {PEERS.get(name, name)}: {speed:.1f} tokens/s", flush=True)
        if case.controls == "greedy" and not number:
            expected = first[OURS]
            for name, ids in first.items():
                found.alike[name] = sum(map(int.__eq__, ids, expected)) / case.rows


def read_speed() -> float:
    """Bytes per second at which this process reads memory, at best."""
    block = torch.ones(64 * 2**20)
    best = 0.0
    for _ in range(20):
        started = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - started))
    return best


def render(kept: dict[str, dict[str, Measured]]) -> str:
    """`results/decode.md`."""
    lines = [
        "# Decoding speed",
        "",
        "Made by `.venv/bin/python benchmarks/decode.py`, which says what the cases are and who answers. Tokens per",
        "second; the fastest of the interleaved rounds. Each line was measured in one run, with the peers in it. The",
        "floor is what steps that do nothing but read the weights once would give; the time of a prompt is not in it.",
    ]
    for model, title in MODELS.items():
        if model in kept:
            lines += ["", f"## {title}", "", *_tables(model, kept[model])]
    return "\n".join(lines) + "\n"


def _tables(model: str, kept: dict[str, Measured]) -> list[str]:
    """Of one model."""
    measured = [(name, kept[name]) for name in CASES if name in kept]
    targets = TARGETS if model == RANDOM else {}
    columns = [OURS, FAST, *PEERS]
    titles = [OURS, FAST, *PEERS.values(), "floor"]
    lines = ["| case | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(titles)]
    for name, one in measured:
        floor = 1e3 * CASES[name].rows / one.floor_ms
        lines.append(f"| {name} | " + " | ".join(_speed(one, each) for each in columns) + f" | {floor:.0f} |")
    lines += ["", "Ratios of ours to theirs, with what is aimed at:", ""]
    titles = ["ours / " + title for title in PEERS.values()] + [f"ours / {FAST}", "step / floor"]
    lines += ["| case | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(titles)]
    for name, one in measured:
        ratios = [_ratio(one, each, targets.get((name, each))) for each in (*PEERS, FAST)]
        steps = CASES[name].rows / one.best(OURS) / one.floor_ms * 1e3
        lines.append(f"| {name} | " + " | ".join([*ratios, f"{steps:.2f}"]) + " |")
    lines += ["", "| case | on | rounds | load before | ours is | first tokens as ours |", "| --- |" + " --- |" * 5]
    for name, one in measured:
        alike = ", ".join(f"{PEERS[who]} {100 * part:.0f} %" for who, part in one.alike.items() if who in PEERS)
        rounds = len(one.speeds[OURS])
        lines.append(
            f"| {name} | {one.date}, {one.machine} | {rounds} | {one.load:.1f} | {one.numerics} | {alike or '-'} |"
        )
    return lines


def _speed(one: Measured, who: str) -> str:
    if who in one.absent:
        return "not installed"
    return f"{one.best(who):.0f}" if who in one.speeds else "-"


def _ratio(one: Measured, who: str, target: float | None) -> str:
    if who not in one.speeds:
        return _speed(one, who)
    if who == FAST and one.numerics != "fast":
        target = EXACT_TARGET
    return f"{one.best(OURS) / one.best(who):.2f}" + (f" (>= {target})" if target else "")


def load_kept() -> dict[str, dict[str, Measured]]:
    """What earlier runs found, by model and case."""
    if not KEPT.is_file():
        return {}
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    return {model: {case: Measured(**entry) for case, entry in found.items()} for model, found in kept.items()}


def keep(kept: dict[str, dict[str, Measured]]) -> None:
    """Write what is known, and the report of it."""
    entries = {model: {case: asdict(one) for case, one in found.items()} for model, found in kept.items()}
    KEPT.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    REPORT.write_text(render(kept), encoding="utf-8")


def obtain(model: str, directory: Path) -> tuple[Path, int]:
    """The checkpoint, and the bytes of weights that a step reads."""
    if model == RANDOM:
        return directory, write_checkpoint(directory)
    checkpoint = prepare_default_model(model_cache(os.environ), lambda line: print(line, file=sys.stderr))
    return checkpoint, (checkpoint / "model.safetensors").stat().st_size  # the logits' matrix is the embeddings'


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = HERE.parent
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", type=Path, default=root / ".venv-vllm/bin/python", help="Python of its environment")
    parser.add_argument("--llama", type=Path, default=root / ".venv-llama/bin/python", help="likewise")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    return parser.parse_args()


def measure_model(
    model: str, arguments: argparse.Namespace, pythons: dict[str, Path], load: float
) -> Iterator[tuple[str, Measured]]:
    """Its cases, one by one."""
    machine = f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}"
    asked = [name for name in arguments.peers if any(name in CASES[case].peers for case in arguments.cases)]
    absent = [name for name in asked if name not in pythons]
    for name in absent:
        print(f"{PEERS[name]}: not installed (benchmarks/peers.sh installs it)")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, step_bytes = obtain(model, Path(directory))
        floor_ms = 1e3 * step_bytes / read_speed()
        with contenders(asked, pythons, checkpoint, arguments.threads) as theirs:
            mine: dict[str, Answer] = {}
            mine[OURS], numerics = ours(checkpoint)
            mine[FAST], _ = ours(checkpoint, kernels="torch", numerics="fast")
            for name in arguments.cases:
                case = CASES[name]
                print(f"{model}, {name}:", flush=True)
                today = str(datetime.datetime.now(tz=datetime.UTC).date())
                gone = [each for each in absent if each in case.peers]
                one = Measured(today, machine, floor_ms, load, numerics, absent=gone)
                answers = mine | {each: theirs[each] for each in case.peers if each in theirs}
                measure(case, answers, arguments.rounds, one)
                yield name, one


def main() -> None:
    arguments = _parse()
    load = os.getloadavg()[0]
    torch.set_num_threads(arguments.threads)
    pythons = find_pythons(arguments)
    kept = load_kept()
    for model in arguments.models:
        for case, one in measure_model(model, arguments, pythons, load):
            kept.setdefault(model, {})[case] = one
            if not arguments.no_results:
                keep(kept)
    print(render({model: {case: kept[model][case] for case in arguments.cases} for model in arguments.models}))


if __name__ == "__main__":
    main()
