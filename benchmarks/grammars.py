"""Cost of the grammar sandbox, and effect of hostile grammars ("bombs") on other requests.

    .venv/bin/python benchmarks/grammars.py
    .venv/bin/python benchmarks/grammars.py --seconds 20 --parts beside

Prints, and writes `results/grammars.md`.

- ``start``: the sandbox process, from its start until it is ready, and its memory; for the tiny
  model's tokenizer and for one of 150,000 random tokens. The worker loads the same tables
  meanwhile.
- ``compile``: grammars in use, each compiled for the first time: in this process alone, and through
  the sandbox.
- ``beside``: clients of a real stack (frontend, worker, tiny model): a plain chat of 32 tokens, and
  one with a new choice. They run alone, with ``--bombs`` clients that send harmless chats, and with
  as many that send bombs, from the generator of the tests' campaign, in turn. Bombs and harmless
  chats request 2 tokens each, one after the other, and report how many were answered: harmless ones
  are answered sooner, and so are sent more often. The ratios are those of medians.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from llguidance import LLMatcher
from machine import processor_name

from adapters.client import processor
from adapters.grammars.compiler import byte_tables, compile_grammar, load_tokenizer, tokens_of
from adapters.grammars.json_schema import lark_grammar
from adapters.grammars.lark import as_grammar
from adapters.grammars.sandbox import GrammarSandbox
from adapters.processors.grammar import tokenizer_tables
from adapters.vocabulary import Vocabulary
from worker.tiny_model import write_tiny_model

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "e2e"), str(HERE.parent / "tests")]

from e2e_stack import Stack, Worker, running_stack  # noqa: E402
from grammar_bombs import bomb  # noqa: E402
from processor_requests import chat  # noqa: E402

REPORT = HERE / "results" / "grammars.md"
PARTS = ("start", "compile", "beside")
TARGET_RATIO, TARGET_DELAY_S = 1.2, 1.0

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "maxItems": 8},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "[0-9]{5}"}}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def random_tables() -> dict[str, Any]:
    """150,000 tokens of one to twelve bytes."""
    source = random.Random(0)
    tokens = {bytes([i]): None for i in range(256)}
    while len(tokens) < 150_000:
        tokens["".join(source.choices("etaoinshrdlu ", k=source.randrange(2, 12))).encode()] = None
    return byte_tables([*tokens, b""])


def started(name: str, tables: dict[str, Any]) -> str:
    began = time.perf_counter()
    with GrammarSandbox(lambda: tables) as sandbox:
        sandbox.wait_ready()
        seconds = time.perf_counter() - began
        assert sandbox.pid is not None
        memory = psutil.Process(sandbox.pid).memory_full_info()
        return f"| {name} | {seconds:.2f} | {memory.rss / 2**20:.0f} | {memory.uss / 2**20:.0f} |"


def starts(tiny: dict[str, Any], large: dict[str, Any]) -> list[str]:
    return [
        "## The process",
        "",
        "| tokenizer | ready after s | resident MiB | of its own MiB |",
        "| --- | --- | --- | --- |",
        started("tiny model, 1,000 tokens", tiny),
        started("150,000 random tokens", large),
    ]


def grammars() -> Iterator[tuple[str, Callable[[int], str]]]:
    """Names, and the grammar in its n-th variant, which no cache has seen."""

    def schema(number: int) -> str:
        properties = {**PERSON["properties"], "number": {"const": number}}
        return as_grammar(lark_grammar({**PERSON, "properties": properties}, compact=True))

    def choices(number: int) -> str:
        return str(LLMatcher.grammar_from_regex("|".join(f"choice {number} {i}" for i in range(100))))

    def pattern(number: int) -> str:
        return str(LLMatcher.grammar_from_regex(f"[A-Z]{{2,{number + 3}}}-[0-9]{{4}}"))

    def arithmetic(number: int) -> str:
        text = f'start: sum\nsum: product (("+" | "-") product)*\nproduct: /[0-9]{{1,{number + 1}}}/ | "(" sum ")"'
        return as_grammar(text)

    yield "JSON Schema, a person", schema
    yield "choice of 100", choices
    yield "regular expression", pattern
    yield "Lark, arithmetic", arithmetic


def compiles(name: str, tables: dict[str, Any], count: int) -> list[str]:
    tokenizer = load_tokenizer(tokens_of(tables))
    lines = []
    with GrammarSandbox(lambda: tables) as sandbox:
        sandbox.wait_ready()
        for kind, make in grammars():
            here = [timed(partial(compile_grammar, tokenizer, make(number)))[0] for number in range(count)]
            tried = [timed(sandbox.submit(make(number)).result) for number in range(count)]
            there = [seconds for seconds, _ in tried]
            num_bytes = tried[0][1].num_bytes
            lines.append(
                f"| {name} | {kind} | {1e3 * statistics.median(here):.1f} | {1e3 * statistics.median(there):.1f} "
                f"| {1e3 * max(there):.1f} | {num_bytes / 1024:.0f} |"
            )
    return lines


COMPILE_HEAD = [
    "## A new grammar",
    "",
    "| tokenizer | grammar | in this process ms | through the sandbox first ms | longest ms | KiB |",
    "| --- | --- | --- | --- | --- | --- |",
]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


@contextmanager
def company(stack: Stack, number: int, fields: Iterator[dict[str, Any]]) -> Iterator[list[int]]:
    """``number`` clients that send one request after the other; statuses of the answers so far."""
    over, statuses = threading.Event(), []

    def send_all() -> None:
        while not over.is_set():
            statuses.append(chat(stack, max_tokens=2, **next(fields)).status)

    with ThreadPoolExecutor(number) as pool:
        sent = [pool.submit(send_all) for _ in range(number)]
        try:
            yield statuses
        finally:
            over.set()
            for one in sent:
                one.result()


class Bombs:
    """The series of bombs; several threads take them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __iter__(self) -> Bombs:
        return self

    def __next__(self) -> dict[str, Any]:
        return bomb(7, next(self._numbers))


def plain(stack: Stack) -> float:
    return timed(lambda: ok(chat(stack, max_tokens=32, ignore_eos=True)))[0]


def chosen(stack: Stack, words: Iterator[int]) -> float:
    word = f"word {next(words)}"
    return timed(lambda: ok(chat(stack, processor("choice", choices=[word, "other"]))))[0]


def ok(reply: Any) -> None:
    if reply.status != 200:
        raise RuntimeError(f"{reply.status} {reply.text[:200]}")


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


ALONE, HARMLESS, BOMBS = "alone", "beside harmless clients", "beside bombs"


def beside(model: Path, seconds: float, rounds: int, bombs: int) -> list[str]:
    words = itertools.count()
    companies: dict[str, tuple[int, Iterator[dict[str, Any]]]] = {
        ALONE: (0, iter(())),
        HARMLESS: (bombs, itertools.repeat({})),
        BOMBS: (bombs, Bombs()),
    }
    samples: dict[tuple[str, str], list[float]] = {
        (kind, where): [] for kind in ("plain", "choice") for where in companies
    }
    statuses: dict[str, list[int]] = {where: [] for where in companies}
    with tempfile.TemporaryDirectory() as directory, running_stack(Path(directory) / "stack", model) as stack:
        stack.start_frontend()
        worker = stack.start_worker("--device", "cpu", "--dtype", "float32")
        sample(stack, words, 2.0)
        memory = [rss(worker)]
        for _ in range(rounds):
            for where, (number, fields) in companies.items():
                others: AbstractContextManager[list[int]] = nullcontext([])
                with company(stack, number, fields) if number else others as answered:
                    for kind, taken in sample(stack, words, seconds).items():
                        samples[kind, where] += taken
                statuses[where] += answered
            memory.append(rss(worker))
    return report(samples, statuses, memory, bombs)


def report(
    samples: dict[tuple[str, str], list[float]], statuses: dict[str, list[int]], memory: list[int], bombs: int
) -> list[str]:
    lines = [
        f"## Beside {bombs} clients that send bombs",
        "",
        "| client | | requests | p50 ms | p99 ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (kind, where), taken in samples.items():
        shown = f"{1e3 * percentile(taken, 0.5):.1f} | {1e3 * percentile(taken, 0.99):.1f}"
        lines.append(f"| {kind} | {where} | {len(taken)} | {shown} |")
    with_bombs = percentile(samples["plain", BOMBS], 0.5)
    ratios = [with_bombs / percentile(samples["plain", where], 0.5) for where in (ALONE, HARMLESS)]
    delay = percentile(samples["choice", BOMBS], 0.99) - percentile(samples["choice", ALONE], 0.99)
    counts = ", ".join(f"{statuses[BOMBS].count(s)} of status {s}" for s in sorted(set(statuses[BOMBS])))
    shown = ", ".join(f"{size / 2**20:.0f}" for size in memory)
    return [
        *lines,
        "",
        f"The plain client beside bombs: {ratios[0]:.2f} of its latency alone (aimed at: <= {TARGET_RATIO}), "
        f"{ratios[1]:.2f} of that beside as many harmless clients. New grammars beside bombs: p99 {delay:.2f} s later "
        f"than alone (aimed at: <= {TARGET_DELAY_S}). Bombs answered: {counts}; harmless chats: "
        f"{len(statuses[HARMLESS])}. The worker's memory before and after each round, MiB: {shown}.",
    ]


def sample(stack: Stack, words: Iterator[int], seconds: float) -> dict[str, list[float]]:
    """A client of each kind, one request after the other, in turn."""
    taken: dict[str, list[float]] = {"plain": [], "choice": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        taken["plain"].append(plain(stack))
        taken["choice"].append(chosen(stack, words))
    return taken


def rss(worker: Worker) -> int:
    return int(psutil.Process(worker.child.pid).memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each sample of `beside`")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bombs", type=int, default=4)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "tiny")
        tiny = tokenizer_tables(Vocabulary.from_pretrained(str(model), 1024))
        large = random_tables()
        parts = []
        if "start" in arguments.parts:
            parts.append(starts(tiny, large))
        if "compile" in arguments.parts:
            parts.append([*COMPILE_HEAD, *compiles("1,000", tiny, 30), *compiles("150,000", large, 30)])
        if "beside" in arguments.parts:
            parts.append(beside(model, arguments.seconds, arguments.rounds, arguments.bombs))
    where = f"{datetime.date.today()}, {processor_name()}, {os.cpu_count()} cores, load before {load:.1f}"
    head = f"# Grammars\n\nMade by `.venv/bin/python benchmarks/grammars.py`, which says what is measured; {where}."
    text = "\n\n".join([head, *("\n".join(part) for part in parts)]) + "\n"
    print(text)
    if set(arguments.parts) == {*PARTS}:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()
