"""Cost of logits processors, as ratios within one run.

    .venv/bin/python benchmarks/processors.py


The figures (32 rows, V = 151,936, float32, CPU) and what each is compared with:

* forcing every row, against filling every row densely, as a processor that writes logits must;
* 200 biases a row, against a Python loop over them;
* a typical chain (bias, penalties, minimum length, thinking budget, JSON Schema) on every row, in
  passes over the logits: one pass is ``logits.copy_(other)``. Planning is shown apart, because it
  needs no logits;
* an idle TensorRT-LLM callable, against a bare Python call of the same shape;
* the history's cost per step, at 128 to 32,768 tokens;
* admitting a prompt of 32,768 tokens: time, and memory at its peak, of the processors that look at
  it, for a prompt of text-like frequencies and for one that repeats itself, whichever is slower.

Results go to ``benchmarks/results/processors.md``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from machine import processor_name

from adapters import create_trtllm_adapters  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapters.catalog import Catalog, Requested, Selection
from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import Bias, Context, apply_sparse
from adapters.processors.grammar import grammar_cache
from adapters.vocabulary import Vocabulary

VOCAB = 151_936
ROWS = 32
END = 0
RESULTS = Path(__file__).parent / "results" / "processors.md"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TYPICAL = (
    Requested("logit_bias", {"bias": {str(i * 7 + 300): 1.5 for i in range(50)}}),
    Requested("repetition_penalty", {"penalty": 1.1}),
    Requested("frequency_penalty", {"penalty": 0.2}),
    Requested("min_tokens", {"n": 1000}),
    Requested("thinking_budget", {"tokens": 4000, "start": "<think>", "end": "</think>"}),
    Requested("json_schema", {"schema": SCHEMA}),
)
HISTORY = (
    Requested("repetition_penalty", {"penalty": 1.1}),
    Requested("presence_penalty", {"penalty": 0.2}),
    Requested("no_repeat_ngram", {"n": 3}),
    Requested("dry", {"multiplier": 0.8}),
    Requested("loop_stop", {"max_period": 20, "copies": 4}),
    Requested("thinking_budget", {"tokens": 100_000, "start": "<think>", "end": "</think>"}),
)

ADMITTED = (
    ("no_repeat_ngram, n = 256", (Requested("no_repeat_ngram", {"n": 256}),), "<= 50 ms, <= 10 MB"),
    ("the same 16 times", (Requested("no_repeat_ngram", {"n": 256}),) * 16, "<= 50 ms, <= 10 MB"),
    ("no_repeat_ngram, n = 1 to 16", tuple(Requested("no_repeat_ngram", {"n": n}) for n in range(1, 17)), ""),
    ("dry", (Requested("dry", path="0"),), ""),
    ("dry with a range", (Requested("dry", {"range": 20_000, "base": 1.1, "allowed_length": 512}, path="0"),), ""),
    ("cite_from_prompt", (Requested("cite_from_prompt", {"conditional_boost": 1.0}),), ""),
    ("repetition_penalty", (Requested("repetition_penalty", {"penalty": 1.1}),), ""),
    ("multiple_choice", (Requested("multiple_choice", {"choices": ["yes", "no"], "boost": 1.0}, path="0"),), ""),
)


def vocabulary() -> Vocabulary:
    """A byte-level vocabulary as wide as Qwen's: bytes, words of letters and digits, tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<end>", *alphabet]
    letters = "etaoinshrdlucmfwypvbgkjqxz0123456789"
    merges = []
    known = set(tokens)
    frontier = list(letters)
    while len(tokens) < VOCAB - 2:
        longer = []
        for head in frontier:
            for letter in letters:
                word = head + letter
                if word in known or len(tokens) >= VOCAB - 2:
                    continue
                known.add(word)
                tokens.append(word)
                merges.append((head, letter))
                longer.append(word)
        frontier = longer
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<end>")
    fast.add_tokens(["<think>", "</think>"])
    return Vocabulary(VOCAB, fast, (END,))


def median_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median wall time of ``run``, after three runs that do not count, milliseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def chain_of(context: Context, wanted: Sequence[Requested], prompt: Sequence[int]) -> ProcessorChain:
    chain = Catalog.default().build_chain(Selection(tuple(wanted)), context, step_budget_s=60)
    chain.start(prompt)
    return chain


def forcing(context: Context, logits: torch.Tensor) -> tuple[float, float]:
    """(applying a forced id to every row, filling every row), ms; both have been decided before."""
    wanted = [Requested("forced_sequence", {"token_ids": [i + 300]}) for i in range(ROWS)]
    chains = [(row, chain_of(context, [each], [5, 6, 7])) for row, each in enumerate(wanted)]

    planned, _ = plan_rows(chains)

    def force() -> None:
        for _ in range(100):
            apply_edits(logits, planned)

    def fill() -> None:
        for row in range(ROWS):
            value = logits[row, row + 300].clone()
            logits[row].fill_(-torch.inf)
            logits[row, row + 300] = value

    return median_ms(force) / 100, median_ms(fill)


def biases(logits: torch.Tensor) -> tuple[float, float]:
    """(200 biases on every row, the same in a Python loop), ms."""
    tables = [{(i * 37 + row) % VOCAB: 0.25 for i in range(200)} for row in range(ROWS)]
    edits = [(row, Bias.of(list(table), list(table.values()))) for row, table in enumerate(tables)]

    def loop() -> None:
        for row, table in enumerate(tables):
            for token_id, bias in table.items():
                logits[row, token_id] += bias

    return median_ms(lambda: apply_sparse(logits, list(edits))), median_ms(loop, repeats=3)


def typical(context: Context, logits: torch.Tensor) -> tuple[float, float, float]:
    """(applying a typical chain to every row, planning it, one pass over the logits), ms.

    Each step accepts a token first, so that nothing is merely repeated: the answers are valid JSON
    being written. The pass is timed in the same steps, so that both find the logits in the same
    caches.
    """
    prompt = context.vocabulary.encode("name a person and their age " * 40)[:200]
    chains = [(row, chain_of(context, TYPICAL, prompt)) for row in range(ROWS)]
    answer = context.vocabulary.encode('{"name":"' + "".join("lorem ipsum dolor sit amet "[i % 27] for i in range(400)))
    steps = iter(range(len(answer)))
    other = torch.randn_like(logits)
    planning: list[float] = []
    applying: list[float] = []
    copying: list[float] = []

    def step() -> None:
        token_id = answer[next(steps)]
        for _, chain in chains:
            chain.accept(token_id, chain.position)
        began = time.perf_counter()
        planned, failures = plan_rows(chains)
        planning.append((time.perf_counter() - began) * 1e3)
        assert not failures, failures
        began = time.perf_counter()
        apply_edits(logits, planned)
        applying.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        logits.copy_(other)
        copying.append((time.perf_counter() - began) * 1e3)

    logits.copy_(other)
    median_ms(step, repeats=60)
    return statistics.median(applying), statistics.median(planning), statistics.median(copying)


def idle_call(context: Context) -> tuple[float, float]:
    """Microseconds of an idle chain's callable, and of a bare Python call of the same shape."""
    chain = chain_of(context, [Requested("forced_prefix", {"token_ids": [300]})], [5, 6, 7])
    (adapter,) = create_trtllm_adapters([chain])
    logits = torch.zeros(1, 1, 64)
    ids = [[5, 6, 7, 300, 301, 302]]
    adapter(1, logits, ids, None, None)

    class Bare:
        def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
            pass

    def per_call(processor: Callable[..., None]) -> float:
        def many() -> None:
            for _ in range(10_000):
                processor(1, logits, ids, None, None)

        return median_ms(many, repeats=7) / 10

    return per_call(adapter), per_call(Bare())


def history(context: Context, lengths: Sequence[int]) -> list[tuple[int, float]]:
    """Microseconds to accept a token and plan, by tokens of history (1,000 distinct ids)."""
    found = []
    for length in lengths:
        prompt = [300 + (i * 7919) % 1000 for i in range(length)]
        chain = chain_of(context, HISTORY, prompt)
        tokens = iter(range(10**9))

        def step(chain: ProcessorChain = chain, tokens: Any = tokens) -> None:
            chain.accept(300 + (next(tokens) * 104_729) % 1000, chain.position)
            chain.plan()

        found.append((length, median_ms(step, repeats=300) * 1e3))
    return found


def admission(context: Context, chosen: Sequence[Requested], length: int) -> tuple[float, float]:
    """Milliseconds and peak MB of building and starting a chain, for the slower prompt."""
    random_numbers = random.Random(1)
    prompts = (
        [300 + int(random_numbers.paretovariate(0.8)) % 100_000 for _ in range(length)],
        [300 + i % 255 for i in range(length)],
        [777] * length,
    )
    found = []
    for prompt in prompts:
        ms = median_ms(partial(chain_of, context, chosen, prompt), repeats=7)
        tracemalloc.start()
        chain_of(context, chosen, prompt)
        found.append((ms, tracemalloc.get_traced_memory()[1] / 1e6))
        tracemalloc.stop()
    return max(found)


def main() -> None:
    """Run, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    context = Context(vocabulary(), frozenset({END}), seed=1)
    grammar_cache(context.vocabulary).tokenizer()
    gc.collect()
    gc.freeze()  # as the worker does: a large vocabulary is garbage-collected for milliseconds otherwise
    logits = torch.randn(ROWS, VOCAB)
    rows: list[tuple[str, str, str, str, str]] = []

    def row(what: str, ours: str, other: str, ratio: str, target: str) -> None:
        rows.append((what, ours, other, ratio, target))

    ours, theirs = forcing(context, logits)
    row("forcing 32 rows; a dense fill", f"{ours:.3f} ms", f"{theirs:.2f} ms", f"{theirs / ours:.0f}x", ">= 100x")
    ours, theirs = biases(logits)
    row("200 biases a row; a loop", f"{ours:.3f} ms", f"{theirs:.0f} ms", f"{theirs / ours:.0f}x", ">= 50x")
    applying, planning, copy = typical(context, logits)
    row(
        "typical chain applied to 32 rows; one pass",
        f"{applying:.2f} ms",
        f"{copy:.2f} ms",
        f"{applying / copy:.1f} passes",
        "<= 2",
    )
    row(
        "planning it, before the logits are there; one pass",
        f"{planning:.2f} ms",
        f"{copy:.2f} ms",
        f"{planning / copy:.1f} passes",
        "<= 0.5",
    )
    ours, theirs = idle_call(context)
    row("idle callable; a bare call", f"{ours:.2f} us", f"{theirs:.2f} us", f"+{ours - theirs:.2f} us", "<= 3 us")
    measured = history(context, (128, 1024, 8192, 32_768))
    first = measured[0][1]
    for length, us in measured:
        row(f"history, {length:,} tokens; 128 tokens", f"{us:.0f} us", f"{first:.0f} us", f"{us / first:.2f}x", "1x")
    for what, chosen, target in ADMITTED:
        ms, megabytes = admission(context, chosen, 32_768)
        row(f"admission of 32,768 tokens, {what}", f"{ms:.1f} ms", f"{megabytes:.1f} MB", "", target)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    when = datetime.date.today().isoformat()
    machine = f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    text = (
        f"# What processors cost\n\nMade by `.venv/bin/python benchmarks/processors.py` on {when} ({machine}); "
        f"V = {VOCAB:,}, {ROWS} rows, float32.\n\n"
        f"| what | ours | compared with | ratio | target |\n| --- | --- | --- | --- | --- |\n{table}\n"
    )
    print(text)
    if not options.no_write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
