"""What speculation gives on the default model: tokens per second with and without, same tokens.

    benchmarks/peers.sh                         # once: environments for vLLM and llama.cpp
    .venv/bin/python benchmarks/speculation.py  # half an hour on a machine that does nothing else
    .venv/bin/python benchmarks/speculation.py --batches 1 --workloads edit --peers --rounds 2
    .venv/bin/python benchmarks/speculation.py --weights served --workloads json text --peers

Prints, and writes `results/speculation.md`, or, of the weights that the launch scripts serve,
quantised and with int8 activations, `results/speculation_served.md`. Peers have whole weights
each time. Every engine answers everything once before it counts,
so that grammars are compiled, prompts are in the prefix cache and kernels are warm: what is
measured is decoding. Then all of them answer in turn, in another order in each round. Each of our
answers is compared with the one without speculation.

Workloads, of which `speculation_workload` has the texts:

- ``json``: an object by a schema with long keys; what the grammar forces is drafted.
- ``tools``, ``schemas``: a call of one of four tools; an object of each of forty schemas of
  Kubernetes (`speculation_forms`). Ours alone.
- ``edit``: a program to which a line is added, and which is repeated otherwise; for the method
  ``prediction`` the program is the prediction.
- ``extract``: the lines of a note that are asked for, word for word.
- ``text``: a story, sampled at temperature 1: next to nothing to draft.

Peers, with and without their own n-gram speculation: vLLM's CPU build, and llama.cpp's Python
package, which answers one request at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import decode_ours

# isort: split
import torch
from machine import processor_name
from speculation_forms import schemas, tools
from speculation_workload import LONGEST, MOST_ROWS, NGRAM, WORKLOADS, Answered, Ask, Workload, timed
from workload import HERE, peer

from worker.engines.embedded import Engine
from worker.engines.embedded.model import HfModel
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.models import model_cache
from worker.models.default_model import DEFAULT_MODEL, prepare_default_model
from worker.sampling import SamplingParams

REPORTS = {"whole": HERE / "results/speculation.md", "served": HERE / "results/speculation_served.md"}
PAUSE_S = 0.3
"""Between two turns, so that threads that wait busily for more work have gone to sleep."""

OURS = {
    "chain": SpeculativeConfig(),
    "prediction": SpeculativeConfig(),
    "ngram": SpeculativeConfig.parse(NGRAM),
    "suffix": SpeculativeConfig(method="suffix", suffix_cache_tokens=0),
}
"""Our methods. No answer is kept for ``suffix``: the next round's would be found in it."""

VLLM, LLAMA = "vLLM", "llama.cpp"
TARGETS = {
    ("json", 1): 2.5,
    ("json", 8): 1.5,
    ("edit", 1): 2.0,
    ("extract", 1): 2.0,
    ("text", 1): 0.95,
    ("text", 8): 0.95,
}
"""Least ratio of the fastest method to none that is aimed at; of the slowest one for text."""

OF_SERVED = {(name, batch): goal for name in ("json", "tools", "schemas") for batch, goal in ((1, 2.5), (8, 2.0))}
"""Those that are other ones where the weights are as served."""

Answer = Callable[[Ask], Answered]


@dataclass(frozen=True)
class Contender:
    """An engine with one method, or without speculation: ``method`` None."""

    engine: str
    method: str | None
    answer: Answer


@dataclass
class Measured:
    """One workload and batch size: tokens per second of each round, and our drafted tokens."""

    workload: str
    batch: int
    rates: dict[tuple[str, str | None], list[float]] = field(default_factory=dict)
    accepted: dict[str, tuple[int, int]] = field(default_factory=dict)

    def median(self, engine: str, method: str | None) -> float:
        return statistics.median(self.rates[engine, method])

    def ratios(self, engine: str, method: str) -> list[float]:
        """Of each round: with speculation against without, in the same round."""
        pairs = zip(self.rates[engine, method], self.rates[engine, None], strict=True)
        return [with_it / without for with_it, without in pairs]


class Ours:
    """Our engine; a method's speculator keeps what it has learnt, as that of a worker does."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.engine = Engine(model, max_num_seqs=MOST_ROWS, context_length=LONGEST, kv_blocks=2048, dtype=dtype)
        own = self.engine.session.stepper.model
        assert isinstance(own, HfModel)
        for tensor in own.kv_store.tensors:
            tensor.zero_()  # memory that has not been touched yet takes as long as a step
        self._speculators = {name: Speculator(config) for name, config in OURS.items()}
        gc.collect()
        gc.freeze()  # as a worker does

    def answer(self, method: str | None, asked: Ask) -> list[list[int]]:
        """Answers, drafted by a method."""
        self.engine.session.stepper.speculator = self._speculators[method or "chain"]
        params = [
            SamplingParams(max_tokens=asked.tokens, temperature=asked.temperature, seed=asked.seed + row)
            for row in range(len(asked.prompts))
        ]
        form = [] if asked.schema is None else [{"name": "json_schema", "args": {"schema": asked.schema}}]
        forms = asked.forms or [form] * len(asked.prompts)
        answers: list[list[int]] = []
        step = asked.together or len(asked.prompts)
        for first in range(0, len(asked.prompts), step):
            some = slice(first, first + step)
            results = self.engine.generate(
                asked.prompts[some],
                params[some],
                progress=False,
                processors=forms[some],
                speculation=method is not None,
                predictions=asked.predictions[some] if method == "prediction" and asked.predictions else None,
            )
            answers += [one.token_ids for one in results]
        return answers

    def drafted(self, method: str) -> tuple[int, int]:
        """Accepted and computed tokens so far."""
        counts = self._speculators[method].counts.values()
        return sum(one.accepted for one in counts), sum(one.proposed for one in counts)

    def ask(self, workload: Workload, batch: int, tokens: int) -> Ask:
        """The first `batch` requests of a workload; all of a longer one, `batch` at a time."""
        chats = workload.chats if len(workload.chats) > MOST_ROWS else workload.chats[:batch]
        prompts = [
            list(self.engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for chat in chats
        ]
        forms = [list(form) for form in workload.forms[: len(chats)]]
        predictions = list(workload.predictions[: len(chats)])
        return Ask(prompts, tokens, workload.temperature, 1, workload.schema, True, forms, predictions, batch)


@contextlib.contextmanager
def contenders(ours: Ours, model: Path, arguments: argparse.Namespace) -> Iterator[list[Contender]]:
    """Everybody who answers: our methods, and the peers that are installed."""
    found = [Contender("ours", name, timed(partial(ours.answer, name))) for name in (None, *arguments.methods)]
    with contextlib.ExitStack() as stack:

        def start(python: Path, script: str, *more: str) -> Answer:
            return stack.enter_context(
                peer(python, model, arguments.threads, script, arguments.dtype, *more, kind=Answered)
            )

        pythons = {VLLM: arguments.vllm, LLAMA: arguments.llama}
        present = [name for name in arguments.peers if pythons[name].is_file()]
        for name in sorted({*arguments.peers} - {*present}):
            print(f"{name}: not installed (benchmarks/peers.sh installs it)", file=sys.stderr)
        if VLLM in present:
            for method in (None, "ngram"):
                answer = start(arguments.vllm, "speculation_vllm.py", method or "none")
                found.append(Contender(VLLM, method, answer))
        if LLAMA in present:
            answer = start(arguments.llama, "speculation_llama.py", *map(str, ours.engine.info.eos_token_ids))
            for speculates in (False, True):
                method = "lookup" if speculates else None
                found.append(
                    Contender(LLAMA, method, lambda asked, on=speculates: answer(replace(asked, speculates=on)))  # type: ignore[misc]
                )
        yield found


def measure(
    ours: Ours, everybody: Sequence[Contender], asked: Ask, rounds: int, cpu_time: bool, found: Measured
) -> None:
    """Fill in the rates, after one turn of everybody that does not count."""
    everybody = [one for one in everybody if one.engine == "ours" or not asked.forms]
    present = [one for one in everybody if one.engine != LLAMA or (len(asked.prompts) == 1 and asked.schema is None)]
    plain = present[0].answer(asked).answers
    for one in present[1:]:
        one.answer(asked)
    before = {name: ours.drafted(name) for name in OURS}
    for number in range(rounds):
        turn = number % len(present)
        for one in present[turn:] + present[:turn]:
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            answered = one.answer(asked)
            seconds = answered.cpu_s if cpu_time else time.perf_counter() - started
            if one.engine == "ours" and answered.answers != plain and ours.engine.info.numerics == "exact":
                raise SystemExit(f"{found.workload}: {one.method} gave other tokens than plain decoding")
            found.rates.setdefault((one.engine, one.method), []).append(answered.num_tokens / seconds)
    for name in OURS:
        accepted, proposed = (now - then for now, then in zip(ours.drafted(name), before[name], strict=True))
        found.accepted[name] = accepted // rounds, proposed // rounds


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def render(rows: Sequence[Measured], arguments: argparse.Namespace, made_by: str, load: float) -> str:
    """The document."""
    lines = [
        "# Speculation",
        "",
        f"Made by `benchmarks/speculation.py`, which says what is asked, of whom, on {datetime.date.today()}:",
        f"{DEFAULT_MODEL}, {arguments.dtype}, {made_by}, {processor_name()}, {arguments.threads} threads,",
        f"load before {load:.1f}. {arguments.rounds} interleaved rounds, answers of {arguments.tokens} tokens at most.",
        "Our answers are those without speculation, token for token.",
        "",
        "Speed with speculation against that without, in the same round: median (lowest to highest).",
        "`chain` drafts what a request's own processors force, and does so with every method.",
        "",
        "| workload | batch | aimed at | chain | prediction | ngram | suffix | vLLM, ngram | llama.cpp, lookup |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    theirs = [(VLLM, "ngram"), (LLAMA, "lookup")]
    shown = [*(("ours", name) for name in OURS), *theirs]
    for one in rows:
        targets = TARGETS | (OF_SERVED if arguments.weights == "served" else {})
        target = targets.get((one.workload, one.batch))
        cells = [spread(one.ratios(*pair)) if pair in one.rates else "-" for pair in shown]
        aim = "" if target is None else f"{target:g}"
        lines.append(f"| {one.workload} | {one.batch} | {aim} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Tokens per second{' of processor time' if arguments.cpu_time else ''}, medians, and in brackets how many",
        "drafted tokens of those computed were accepted.",
        "",
        "| workload | batch | ours, none | chain | prediction | ngram | suffix "
        "| vLLM, none | ngram | llama.cpp, none | lookup |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    columns = [("ours", None), *(("ours", name) for name in OURS)]
    columns += [(VLLM, None), (VLLM, "ngram"), (LLAMA, None), (LLAMA, "lookup")]
    for one in rows:
        cells = []
        for engine, method in columns:
            cell = f"{one.median(engine, method):.0f}" if (engine, method) in one.rates else "-"
            if engine == "ours" and (engine, method) in one.rates and method is not None:
                accepted, proposed = one.accepted[method]
                cell += f" ({accepted} of {proposed})"
            cells.append(cell)
        lines.append(f"| {one.workload} | {one.batch} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = HERE.parent
    names = ["json", "tools", "schemas", *(one.name for one in WORKLOADS if one.name != "json")]
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="WORKLOAD")
    parser.add_argument("--batches", nargs="+", type=int, choices=range(1, MOST_ROWS + 1), default=[1, MOST_ROWS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=[*OURS], default=[*OURS], metavar="METHOD", help="of ours")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="as the launch scripts")
    parser.add_argument("--weights", choices=[*REPORTS], default="whole", help="ours: whole, or as served (quantised)")
    parser.add_argument("--peers", nargs="*", choices=[VLLM, LLAMA], default=[VLLM, LLAMA], metavar="PEER")
    parser.add_argument("--vllm", type=Path, default=root / ".venv-vllm/bin/python", help="Python of its environment")
    parser.add_argument("--llama", type=Path, default=root / ".venv-llama/bin/python", help="likewise")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor's time, on a busy machine")
    parser.add_argument("--show", action="store_true", help="print our answers, and measure nothing")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    return parser.parse_args()


def show(ours: Ours, workload: Workload, batch: int, tokens: int) -> None:
    """Print our answers."""
    for answer in ours.answer(None, ours.ask(workload, batch, tokens)):
        print(f"--- {workload.name}, {len(answer)} tokens\n{ours.engine.tokenizer.decode(answer)}")


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr)


def main() -> None:
    arguments = _parse()
    load = os.getloadavg()[0]
    torch.set_num_threads(arguments.threads)
    model = prepare_default_model(model_cache(), say)
    own = prepare_default_model(model_cache(), say, keeps_blocks=arguments.weights == "served")
    ours = Ours(own, arguments.dtype)
    workloads = [one for one in (*WORKLOADS, tools(), schemas()) if one.name in arguments.workloads]
    if arguments.show:
        for workload in workloads:
            show(ours, workload, max(arguments.batches), arguments.tokens)
        return
    rows: list[Measured] = []
    with contenders(ours, model, arguments) as everybody:
        for batch in arguments.batches:
            for workload in workloads:
                found = Measured(workload.name, batch)
                asked = ours.ask(workload, batch, arguments.tokens)
                measure(ours, everybody, asked, arguments.rounds, arguments.cpu_time, found)
                rows.append(found)
                text = render(rows, arguments, decode_ours.made_by(ours.engine), load)
                print(text.splitlines()[11 + len(rows)], flush=True)
                if not arguments.no_results:
                    REPORTS[arguments.weights].write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
