"""What speculation gives on the default model: tokens per second with and without, same tokens.

    .venv/bin/python benchmarks/speculation.py
    .venv/bin/python benchmarks/speculation.py --tokens 64 --batches 1 --methods none,ngram

Prints, and writes `results/speculation.md`. One process, one model; the methods take turns on each
workload, each after one warm-up of its own, so that what the machine does besides touches all
alike. Every answer is compared with the one without speculation.

- ``json``: an object by a schema with long keys; what the grammar forces is drafted.
- ``edit``: a program with one name changed, which mostly repeats the prompt.
- ``extract``: lines of a text, word for word.
- ``text``: a story, sampled at temperature 1: next to nothing to draft.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.engines.embedded import Engine
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.models import model_cache
from worker.models.default_model import DEFAULT_MODEL, prepare_default_model
from worker.sampling import SamplingParams

Clock = Callable[[], float]

REPORT = Path(__file__).resolve().parent / "results" / "speculation.md"

PROGRAM = """def average_of_column(rows, column):
    total = 0.0
    count = 0
    for row in rows:
        value = row.get(column)
        if value is None:
            continue
        total += float(value)
        count += 1
    if count == 0:
        raise ValueError("no row has a value in the column " + column)
    return total / count
"""

LETTER = """On Monday the harbour office received three reports. The ferry Alexandra left Portsmouth
at 06:40 with 212 passengers. The freighter Nordlicht reached the northern quay at 09:15 with 4,300
tonnes of grain. The trawler Maria Celeste asked for a pilot at 11:05 because of fog."""

LONG_KEYS: dict[str, Any] = {
    "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 9999},
    "preferred_communication_language": {"enum": ["English", "German", "French"]},
    "is_subscribed_to_the_newsletter": {"type": "boolean"},
    "shipping_address_is_billing_address": {"type": "boolean"},
    "number_of_orders_in_the_last_year": {"type": "integer", "minimum": 0, "maximum": 99},
    "loyalty_programme_membership_level": {"enum": ["none", "silver", "gold"]},
}
SCHEMA = {"type": "object", "properties": LONG_KEYS, "required": [*LONG_KEYS], "additionalProperties": False}


@dataclass(frozen=True)
class Workload:
    """One kind of request."""

    name: str
    question: str
    controls: dict[str, Any] = field(default_factory=dict)
    processors: list[dict[str, Any]] = field(default_factory=list)


WORKLOADS = (
    Workload(
        "json",
        "Describe a customer of a bookshop as JSON.",
        processors=[{"name": "json_schema", "args": {"schema": SCHEMA}}],
    ),
    Workload("edit", f"Repeat this program, with total renamed to result:\n\n```python\n{PROGRAM}```"),
    Workload("extract", f"Repeat this text word for word, without a comment:\n\n{LETTER}"),
    Workload("text", "Write a story about a lighthouse.", {"temperature": 1.0, "seed": 1}),
)


@dataclass
class Run:
    """Tokens and seconds of one method on one workload."""

    tokens: int
    seconds: float
    answers: list[list[int]]
    accepted: int = 0
    proposed: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def prompts(engine: Engine, workload: Workload, batch: int) -> list[list[int]]:
    """Chats that differ in a word, so that no two share more than a beginning."""
    asked = [f"{workload.question} ({number})" if number else workload.question for number in range(batch)]
    chats = [[{"role": "user", "content": text}] for text in asked]
    return [
        list(engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats
    ]


def run(engine: Engine, workload: Workload, batch: int, tokens: int, method: str, clock: Clock) -> Run:
    """Generate once to warm up and once to measure."""
    speculator = Speculator(SpeculativeConfig(method=method) if method != "off" else None, clock=clock)
    engine.session.stepper.speculator = speculator
    asked = prompts(engine, workload, batch)
    for count in (16, tokens):
        params = SamplingParams(max_tokens=count, **workload.controls)
        before = {name: (one.proposed, one.accepted) for name, one in speculator.counts.items()}
        began = clock()
        results = engine.generate(
            asked, params, progress=False, processors=workload.processors, speculation=method != "off"
        )
        seconds = clock() - began
    answers = [one.token_ids for one in results]
    found = Run(sum(map(len, answers)), seconds, answers)
    for name, one in speculator.counts.items():
        proposed, accepted = before.get(name, (0, 0))
        found.proposed += one.proposed - proposed
        found.accepted += one.accepted - accepted
    return found


def measure(
    engine: Engine, workloads: Sequence[str], batches: Sequence[int], tokens: int, methods: Sequence[str], clock: Clock
) -> Iterator[str]:
    """Rows of the table."""
    for batch in batches:
        for workload in [one for one in WORKLOADS if one.name in workloads]:
            plain = run(engine, workload, batch, tokens, "off", clock)
            cells = [f"{plain.rate:.1f}"]
            for method in methods:
                found = run(engine, workload, batch, tokens, method, clock)
                assert found.answers == plain.answers or engine.info.numerics != "exact", (workload.name, method)
                same = "" if found.answers == plain.answers else ", other tokens"
                cells.append(f"{found.rate / plain.rate:.2f} ({found.accepted} of {found.proposed}{same})")
            yield f"| {workload.name} | {batch} | {' | '.join(cells)} |"


def report(engine: Engine, rows: Sequence[str], methods: Sequence[str], seconds: str) -> str:
    """The document."""
    head = f"| workload | batch | without, tokens per {seconds} | {' | '.join(methods)} |"
    return "\n".join(
        [
            "# Speculation",
            "",
            f"`benchmarks/speculation.py`, {datetime.date.today()}, {DEFAULT_MODEL}, {engine.info.computed_by},",
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores. Of each method: its speed relative",
            "to that without, and how many drafted tokens were accepted of those computed; `none` is the chain alone.",
            "Answers are those without speculation, token for token, unless a cell says otherwise.",
            "",
            head,
            "| --- " * (3 + len(methods)) + "|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer at most")
    parser.add_argument("--workloads", default=",".join(one.name for one in WORKLOADS))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--methods", default="none,ngram,suffix")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--numerics", default="auto")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor's time, on a busy machine")
    arguments = parser.parse_args()
    model = prepare_default_model(model_cache(os.environ), print)
    engine = Engine(
        model,
        max_num_seqs=8,
        context_length=1024,
        kv_blocks=512,
        dtype=arguments.dtype,
        numerics=arguments.numerics,
    )
    methods = arguments.methods.split(",")
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    seconds = "second of processor time" if arguments.cpu_time else "second"
    batches = [int(one) for one in arguments.batches.split(",")]
    rows: list[str] = []
    for row in measure(engine, arguments.workloads.split(","), batches, arguments.tokens, methods, clock):
        print(row, flush=True)
        rows.append(row)
        REPORT.write_text(report(engine, rows, methods, seconds))


if __name__ == "__main__":
    main()
