"""The sampler against transformers' warpers and against one read of the logits, in one run.

    .venv/bin/python benchmarks/sampler.py

Prints a table and writes it to `results/sampler.md`, with a plot in `results/sampler.svg`. Rounds
are interleaved, and the fastest round of each counts: other work on the machine can only make a
round slower.

- read: the maximum of each row, the cheapest operation that reads every logit.
- ours: `Sampler.sample`, from logits to token ids, with its checks and its own random numbers.
- transformers: a `LogitsProcessorList` of the same controls, softmax and `torch.multinomial`.
- torch: `log_softmax`, `topk` and a count of those as high, as for vLLM's log probabilities.

Even logits are normal with a deviation of 3: thousands of tokens are in the nucleus, and a row with
top-p alone needs the weights of the whole row. Peaked logits fall with the logarithm of a token's
rank, as a language model's do (Zipf).
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import processor_name
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from adapters.contract import apply_bitmask
from adapters.sampling.candidates import block_maxima
from worker.engines.embedded.plan import Edits, Plan, Request
from worker.engines.embedded.sampling import token_logprobs
from worker.engines.embedded.sampling.sampler import Sampler
from worker.sampling import SamplingParams

RESULTS = Path(__file__).resolve().parent / "results"
VOCAB_SIZES = (32_000, 128_256, 151_936)
BATCH_SIZES = (1, 8, 32)
TOP_N = 5
"""Log probabilities beside the sampled token's."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """Controls for ours and transformers, and the target ratio for the largest batch."""

    name: str
    params: SamplingParams
    warpers: LogitsProcessorList
    make_logits: Callable[[int, int], torch.Tensor]
    target: float | None = None


def even(batch_size: int, vocab_size: int) -> torch.Tensor:
    """Normal logits, ``[B, V]``."""
    return torch.randn(batch_size, vocab_size, generator=torch.Generator().manual_seed(1)) * 3


def peaked(batch_size: int, vocab_size: int) -> torch.Tensor:
    """Logits of a power law, in random order, ``[B, V]``."""
    generator = torch.Generator().manual_seed(2)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(batch_size)])
    return 20 - 1.6 * (ranks + 1).log() + 0.3 * torch.randn(batch_size, vocab_size, generator=generator)


def cases() -> list[Case]:
    every = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)]
    top_p = LogitsProcessorList([TopPLogitsWarper(0.9)])
    nucleus = SamplingParams(temperature=1.0, top_p=0.9)
    return [
        Case(
            "temperature, top-k 50, top-p 0.9, min-p",
            SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
            LogitsProcessorList(every),
            even,
            80,
        ),
        Case("top-p 0.9, peaked", nucleus, top_p, peaked, 30),
        Case("top-p 0.9, even", nucleus, top_p, even, 40),
        Case(
            "temperature alone",
            SamplingParams(temperature=0.8),
            LogitsProcessorList([TemperatureLogitsWarper(0.8)]),
            even,
        ),
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """Fastest rounds of one case, in seconds."""

    case: Case
    vocab_size: int
    batch_size: int
    read: float
    ours: float
    theirs: float


def fastest(works: Sequence[Callable[[], object]], num_rounds: int) -> list[float]:
    """Seconds of each one's fastest round; run in turn."""
    best = [math.inf] * len(works)
    for _ in range(num_rounds):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def plan_of(params: SamplingParams, batch_size: int) -> Plan:
    requests = tuple(
        Request(str(i), i, params, tokens=[0] * 64, prompt_length=64, limit=128, end_ids=frozenset(), seed=i)
        for i in range(batch_size)
    )
    return Plan(requests, (), requests)


def measure(case: Case, vocab_size: int, batch_size: int, num_rounds: int) -> Row:
    logits = case.make_logits(batch_size, vocab_size)
    sampler, plan = Sampler(vocab_size, ()), plan_of(case.params, batch_size)
    prompt = torch.zeros(batch_size, 1, dtype=torch.long)
    warpers: Any = case.warpers

    def theirs() -> torch.Tensor:
        weights: torch.Tensor = warpers(prompt, logits).softmax(-1)
        return torch.multinomial(weights, 1)

    def ours() -> object:
        return sampler.sample(logits, Edits(), plan)

    (slow,) = fastest([theirs], 3)
    read, fast = fastest([lambda: logits.amax(-1), ours], num_rounds)
    slow = min(slow, *fastest([theirs], 2))
    return Row(case, vocab_size, batch_size, read, fast, slow)


def measure_all(num_rounds: int) -> Iterator[Row]:
    for case in cases():
        for vocab_size in VOCAB_SIZES:
            for batch_size in BATCH_SIZES:
                row = measure(case, vocab_size, batch_size, num_rounds)
                print(as_line(row), flush=True)
                yield row


HEADER = """\
| controls | V | B | read, ms | ours, ms | transformers, ms | transformers / ours | ours / read |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def as_line(row: Row) -> str:
    ms = " | ".join(f"{1e3 * value:,.3f}" for value in (row.read, row.ours, row.theirs))
    ratios = f"{row.theirs / row.ours:,.1f} | {row.ours / row.read:,.1f}"
    return f"| {row.case.name} | {row.vocab_size:,} | {row.batch_size} | {ms} | {ratios} |"


BITMASK_HEADER = """\
| V | B | copy, ms | half the bits set, ms | 1 in 1,000 clear, ms | half / copy | few / copy |
| --- | --- | --- | --- | --- | --- | --- |"""


def bitmask_lines(num_rounds: int) -> Iterator[str]:
    generator = torch.Generator().manual_seed(3)
    for vocab_size in VOCAB_SIZES:
        for batch_size in BATCH_SIZES:
            logits, other = even(batch_size, vocab_size), torch.empty(batch_size, vocab_size)
            shape = (batch_size, -(-vocab_size // 32))
            half = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
            full = torch.where(torch.rand(shape, generator=generator) < 0.032, -2, -1).int()
            times = fastest(
                [
                    partial(other.copy_, logits),
                    partial(apply_bitmask, logits, half),
                    partial(apply_bitmask, logits, full),
                ],
                num_rounds,
            )
            ms = " | ".join(f"{1e3 * value:.3f}" for value in times)
            ratios = f"{times[1] / times[0]:.2f} | {times[2] / times[0]:.2f}"
            yield f"| {vocab_size:,} | {batch_size} | {ms} | {ratios} |"


LOGPROBS_HEADER = """\
| V | B | torch, ms | ours, ms | torch / ours |
| --- | --- | --- | --- | --- |"""


def logprob_lines(num_rounds: int) -> Iterator[str]:
    for vocab_size in VOCAB_SIZES:
        for batch_size in BATCH_SIZES:
            logits = even(batch_size, vocab_size)
            token_ids = list(range(batch_size))
            chosen = torch.tensor(token_ids)[:, None]

            def theirs(logits: torch.Tensor = logits, chosen: torch.Tensor = chosen) -> None:
                logprobs = logits.log_softmax(-1)
                values, ids = logprobs.topk(TOP_N)
                own = logprobs.gather(-1, chosen)
                ranks = (logprobs >= own).sum(-1)
                for each in (values, ids, own, ranks):
                    each.tolist()

            ours = partial(token_logprobs, logits, token_ids, [TOP_N] * batch_size)
            other, own = fastest([theirs, ours], num_rounds)
            ratio = f"{other / own:.1f}"
            yield f"| {vocab_size:,} | {batch_size} | {1e3 * other:.3f} | {1e3 * own:.3f} | {ratio} |"


def check_share(rows: Sequence[Row], num_rounds: int) -> str:
    """What looking for rows that cannot be sampled adds to the largest step of the first case."""
    step = rows[len(VOCAB_SIZES) * len(BATCH_SIZES) - 1]
    maxima = block_maxima(even(step.batch_size, step.vocab_size))
    (check,) = fastest([lambda: maxima.amax(-1).tolist()], num_rounds)
    return f"Looking for NaN, +inf and empty rows is {100 * check / step.ours:.1f} % of that step."


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if (row.vocab_size, row.batch_size) != (VOCAB_SIZES[-1], BATCH_SIZES[-1]) or row.case.target is None:
            continue
        ratio = row.theirs / row.ours
        met = "met" if ratio >= row.case.target else "missed"
        yield f"- {row.case.name}: {ratio:.0f} times transformers, target {row.case.target:.0f}: {met}."
    first = rows[len(VOCAB_SIZES) * len(BATCH_SIZES) - 1]
    reads = first.ours / first.read
    yield f"- {first.case.name}: {reads:.1f} reads of the logits, target 4: {'met' if reads <= 4 else 'missed'}."


def plot(rows: Sequence[Row]) -> str:
    """Times over the batch size at the largest vocabulary, both axes logarithmic, as SVG."""
    chosen = [row for row in rows if row.vocab_size == VOCAB_SIZES[-1]]
    first = chosen[: len(BATCH_SIZES)]
    lines = [("one read of the logits", "#888888", [row.read for row in first])]
    colours = ("#1b7837", "#2166ac", "#762a83", "#b35806")
    for i, colour in zip(range(0, len(chosen), len(BATCH_SIZES)), colours, strict=True):
        part = chosen[i : i + len(BATCH_SIZES)]
        lines.append((f"ours: {part[0].case.name}", colour, [row.ours for row in part]))
    lines.append((f"transformers: {first[0].case.name}", "#b2182b", [row.theirs for row in first]))
    low, high = 1e-6, 1.0
    shapes = []
    for power in range(-6, 1):
        y = _height(10.0**power, low, high)
        label = f"{10.0 ** (power + 3):g} ms"
        shapes.append(f'<line x1="80" x2="460" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        shapes.append(f'<text x="74" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for batch_size in BATCH_SIZES:
        shapes.append(f'<text x="{_across(batch_size):.1f}" y="382" text-anchor="middle">B = {batch_size}</text>')
    for i, (name, colour, values) in enumerate(lines):
        places = [(_across(b), _height(value, low, high)) for b, value in zip(BATCH_SIZES, values, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        shapes.append(f'<text x="475" y="{60 + 22 * i}" fill="{colour}">{name}</text>')
    title = f'<text x="80" y="24" font-size="15">Sampling, V = {VOCAB_SIZES[-1]:,}, one step</text>'
    body = "\n".join([title, *shapes])
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="840" height="400" font-family="sans-serif" font-size="12">\n'
        f'<rect width="840" height="400" fill="white"/>\n{body}\n</svg>\n'
    )


def _across(batch_size: int) -> float:
    return 100 + 340 * math.log(batch_size) / math.log(BATCH_SIZES[-1])


def _height(seconds: float, low: float, high: float) -> float:
    return 360 - 320 * math.log(seconds / low) / math.log(high / low)


def report(rows: Sequence[Row], bitmasks: Sequence[str], logprobs: Sequence[str], check: str, num_rounds: int) -> str:
    parts = [
        "# What sampling costs",
        "Made by `.venv/bin/python benchmarks/sampler.py`, which says what is compared. Fastest of "
        f"{num_rounds} interleaved rounds, {torch.get_num_threads()} thread.",
        "\n".join(verdicts(rows)) + "\n- " + check,
        "![Times over the batch size](sampler.svg)",
        HEADER + "\n" + "\n".join(as_line(row) for row in rows),
        "Applying a bitmask, against a copy of the logits (target: 1.5):",
        BITMASK_HEADER + "\n" + "\n".join(bitmasks),
        f"Log probabilities of the sampled token, its rank and the top {TOP_N}: ours in float64, torch's in float32:",
        LOGPROBS_HEADER + "\n" + "\n".join(logprobs),
        "A small batch stays in the processor's cache, where a read costs next to nothing; what is left there is the\n"
        "cost of Python around one call of a kernel.",
        f"{datetime.date.today()}, {processor_name()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f};\nPython {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(HEADER)
    with torch.inference_mode():
        rows = list(measure_all(arguments.rounds))
        bitmasks = list(bitmask_lines(arguments.rounds))
        logprobs = list(logprob_lines(arguments.rounds))
        check = check_share(rows, arguments.rounds)
    text = report(rows, bitmasks, logprobs, check, arguments.rounds)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sampler.md").write_text(text)
    (RESULTS / "sampler.svg").write_text(plot(rows))
    print(text)


if __name__ == "__main__":
    main()
