"""Cost of the logits processors inside vLLM, as ratios within one run.

    scripts/install --vllm                               # once: vLLM's environment
    .venv-vllm/bin/python benchmarks/vllm_processors.py  # minutes

On a machine with other work ``OMP_NUM_THREADS=1`` avoids threads that wait for each other.

SmolLM2-135M-Instruct on vLLM's CPU build, two engines in this process. Both decode 16 requests at
a time, 48 tokens each, and take turns step by step, so that whatever slows the machine slows both.
One decodes plain requests without `adapters.vllm:Processors`; the other one

* plain requests with the class loaded;
* json_schema and repetition_penalty on every row;
* without the class, vLLM's own structured outputs beside its own penalty (xgrammar and guidance).

For the first two cases the engines change places halfway, since equal engines differ by some
percent. The ratio is that of the sums over all pairs of steps, its 95 % interval a bootstrap over
the pairs (Efron 1979).

Measured alone is the time of the class's own step, from vLLM's update to edited logits, without any
model: for requests without processors, and for 32 typical chains (bias, penalties, minimum length,
and JSON Schema); beside it the time that llguidance alone takes for the masks of the same tokens.

Results go to ``benchmarks/results/vllm_processors.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

# isort: split
import numpy as np
import torch
from machine import processor_name
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate

from adapters.grammars.compiler import compile_grammar
from adapters.processors.grammar import JsonSchema, grammar_cache
from adapters.vllm.model import model_of
from adapters.vllm.processors import Processors
from worker.models import model_cache, prepare_default_model

RESULTS = Path(__file__).parent / "results" / "vllm_processors.md"
ROWS, NEW, STEP_ROWS = 16, 48, 32
NUM_STEPS, NUM_WARM_STEPS, STEP_ROUNDS = 160, 10, 5
NUM_PREFILL_STEPS, NUM_RESAMPLES = 4, 2000
STEP_TARGET_MS = 1.0
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 60}},
    "required": ["items"],
    "additionalProperties": False,
}
"""Answers do not end before the last token. The bound of its strings makes masks slow."""
FREE = {"type": "array", "items": {"type": "string"}, "minItems": 60}
"""The masks inside its strings are all the same."""
PROMPTS = [f"A list of things, number {number}, in JSON:" for number in range(ROWS)]


def selection(*processors: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """``extra_args`` that name processors."""
    named = [{"name": name, "args": args} for name, args in processors]
    return {"logits_processors": json.dumps({"version": 1, "processors": named})}


def cases() -> dict[str, Callable[[], SamplingParams]]:
    """Parameters of the requests of each case."""
    grammar = ("json_schema", {"schema": SCHEMA})
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
    ended = {**fields, "ignore_eos": False}  # a grammar needs an end token
    own = {"repetition_penalty": 1.1}
    return {
        "plain": lambda: SamplingParams(**fields),
        "chains": lambda: SamplingParams(
            **ended, extra_args=selection(grammar, ("repetition_penalty", {"penalty": 1.1}))
        ),
        "vLLM's": lambda: SamplingParams(**ended, **own, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    }


def engine(model: Path, backend: str) -> LLM:
    """An engine with the class, and with a backend of vLLM's structured outputs."""
    return LLM(
        str(model),
        logits_processors=[Processors],
        structured_outputs_config={"backend": backend},
        max_model_len=512,
        max_num_seqs=ROWS,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def load(llm: LLM, *, loaded: bool) -> None:
    """Let an idle engine have the class, or be as one that was started without it."""

    def change(worker: Any) -> None:
        batch = worker.model_runner.input_batch
        found = batch.logitsprocs.non_argmax_invariant
        found[:] = [each for each in found if not isinstance(each, Processors)]
        found += [Processors(worker.vllm_config, torch.device("cpu"))] if loaded else []
        batch.logitsprocs_need_output_token_ids = loaded

    llm.collective_rpc(change)


@dataclass(frozen=True)
class Case:
    """Requests of one engine, beside plain requests of the other.

    Attributes:
        name: Controls that the requests ask for, as a row of the report is called.
        params: Key of `cases`.
        backend: Engine that serves them, without the class; None for both in turn, with the class.
        goal: Ratio of tokens per second that should be reached, None if there is no goal.
    """

    name: str
    params: str
    backend: str | None = None
    goal: float | None = None


CASES = (
    Case("class loaded, no processor", "plain", goal=0.98),
    Case("json_schema + repetition_penalty", "chains", goal=0.90),
    Case("vLLM's guidance + penalty", "vLLM's", "guidance"),
    Case("vLLM's xgrammar + penalty", "vLLM's", "xgrammar"),
)


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of a case, divided by those of plain requests, and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, plain: np.ndarray[Any, Any], case: np.ndarray[Any, Any]) -> Ratio:
        """The ratio of pairs of steps.

        Args:
            plain: Seconds of each step of plain requests, float64 ``[n]``.
            case: Seconds of the step of the case beside it, float64 ``[n]``.
        """
        chosen = np.random.default_rng(0).integers(len(plain), size=(NUM_RESAMPLES, len(plain)))
        low, high = np.quantile(plain[chosen].sum(1) / case[chosen].sum(1), (0.025, 0.975))
        return cls(float(plain.sum() / case.sum()), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def pairs(plain: LLM, beside: LLM, params: Callable[[], SamplingParams], rounds: int) -> np.ndarray[Any, Any]:
    """Seconds of decoding steps that take turns: float64 ``[pairs, 2, 2]``, of plain requests and
    of those beside them, wall time and this process's processor time.

    Args:
        plain: Engine that decodes plain requests.
        beside: Another engine.
        params: Parameters of its requests.
        rounds: Batches of `ROWS` requests that count; a short one before them compiles grammars.
    """
    found = []
    for number in range(rounds + 1):
        for llm, make in ((plain, cases()["plain"]), (beside, params)):
            for row, prompt in enumerate(PROMPTS):
                asked = make()
                asked.max_tokens = NEW if number else NUM_PREFILL_STEPS
                llm.llm_engine.add_request(f"{number}-{row}", prompt, asked)
        for step in range(NEW - NUM_PREFILL_STEPS if number else 0):
            times = [[0.0, 0.0], [0.0, 0.0]]
            for which in (0, 1) if step % 2 else (1, 0):
                began, began_cpu = time.perf_counter(), time.process_time()
                (plain, beside)[which].llm_engine.step()
                times[which] = [time.perf_counter() - began, time.process_time() - began_cpu]
            if step >= NUM_PREFILL_STEPS:
                found.append(times)
        for llm in (plain, beside):
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
    return np.array(found)


TYPICAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("logit_bias", {"bias": {str(i * 7 + 300): 1.5 for i in range(50)}}),
    ("repetition_penalty", {"penalty": 1.1}),
    ("frequency_penalty", {"penalty": 0.3}),
    ("min_tokens", {"n": 20}),
    ("json_schema", {"schema": SCHEMA}),
)
"""The processors of a typical chain."""


def step_ms(llm: LLM, rows: int, extra_args: dict[str, Any] | None) -> tuple[float, list[list[int]]]:
    """Milliseconds of processor time of the class's step (`_typical`), and the tokens of each row.

    Args:
        llm: An engine, whose configuration counts.
        rows: Requests in the batch.
        extra_args: Extra arguments of each request.
    """
    config = llm.llm_engine.vllm_config
    width = config.model_config.get_vocab_size()
    processors = Processors(config, torch.device("cpu"), False)
    outputs: list[list[int]] = [[] for _ in range(rows)]
    prompt = list(range(300, 428))
    added = [
        (n, SamplingParams(max_tokens=256, extra_args=extra_args), prompt, output) for n, output in enumerate(outputs)
    ]
    processors.update_state(BatchUpdate(rows, [], added, []))
    source = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    logits, times = source.clone(), []
    for _ in range(NUM_STEPS):
        logits.copy_(source)
        began = time.thread_time()
        processors.update_state(None)
        processors.apply(logits)
        times.append((time.thread_time() - began) * 1e3)
        for output, token_id in zip(outputs, logits.argmax(-1).tolist(), strict=True):
            output.append(token_id)
    return _typical(times), outputs


def llguidance_ms(llm: LLM, schema: dict[str, Any], outputs: list[list[int]]) -> float:
    """Milliseconds of processor time of llguidance alone: it takes a token and computes a mask for
    each row of a step (`_typical`).

    Args:
        llm: An engine, whose vocabulary counts.
        schema: The JSON Schema.
        outputs: Tokens of each row, as of `step_ms`.
    """
    vocabulary = model_of(llm.llm_engine.vllm_config).context.vocabulary
    cache = grammar_cache(vocabulary)
    grammar = JsonSchema.grammar(JsonSchema.Args.model_validate({"schema": schema}), vocabulary)
    compiled = compile_grammar(cache.tokenizer(), grammar)
    matchers = [compiled.deep_copy() for _ in outputs]
    mask, times = np.zeros(cache.tokenizer().eos_token // 32 + 1, dtype=np.int32), []
    address, num_bytes = mask.ctypes.data, mask.nbytes
    for tokens in zip(*outputs, strict=True):
        began = time.thread_time()
        for matcher, token_id in zip(matchers, tokens, strict=True):
            matcher.consume_token(token_id)
            matcher.unsafe_compute_mask_ptr(address, num_bytes)
        times.append((time.thread_time() - began) * 1e3)
    return _typical(times)


def _typical(times: list[float]) -> float:
    """The median of the fastest half of the steps, the first ones left out."""
    return statistics.median(sorted(times[NUM_WARM_STEPS:])[: (NUM_STEPS - NUM_WARM_STEPS) // 2])


Found = dict[str, np.ndarray[Any, Any]]
"""The `pairs` of each case."""


def run(rounds: int) -> tuple[Found, dict[str, float]]:
    """The pairs of steps of all cases, and the milliseconds of the class's steps."""
    model = prepare_default_model(model_cache(os.environ), lambda line: None)
    asked, found = cases(), Found()
    engines = {backend: engine(model, backend) for backend in ("xgrammar", "guidance")}
    for case in CASES:
        turns = []
        for backend in [case.backend] if case.backend else engines:
            (plain,) = (llm for name, llm in engines.items() if name != backend)
            load(plain, loaded=False)
            load(engines[backend], loaded=case.backend is None)
            turns.append(pairs(plain, engines[backend], asked[case.params], rounds))
        found[case.name] = np.concatenate(turns)
        print(f"{case.name}: {[str(Ratio.of(*each[:, :, 1].T)) for each in turns]} of plain requests", flush=True)
    return found, step_times(engines["guidance"])


def step_times(llm: LLM) -> dict[str, float]:
    """Milliseconds of each kind of step: the least of `STEP_ROUNDS` interleaved rounds."""
    least: dict[str, float] = {}
    for _ in range(STEP_ROUNDS):
        times = {
            f"a step of {ROWS} requests without processors": step_ms(llm, ROWS, None)[0],
            f"a step of {STEP_ROWS} typical chains without a grammar": step_ms(
                llm, STEP_ROWS, selection(*TYPICAL[:-1])
            )[0],
            "a step of one typical chain": step_ms(llm, 1, selection(*TYPICAL))[0],
        }
        for strings, schema in {"strings of any length": FREE, "bounded strings": SCHEMA}.items():
            chosen = (*TYPICAL[:-1], ("json_schema", {"schema": schema}))
            name = f"a step of {STEP_ROWS} typical chains, {strings}"
            times[name], outputs = step_ms(llm, STEP_ROWS, selection(*chosen))
            times[f"llguidance alone, {strings}"] = llguidance_ms(llm, schema, outputs)
        least = {name: min(value, least.get(name, value)) for name, value in times.items()}
    return least


def report(found: Found, steps: dict[str, float]) -> str:
    """The page of results."""
    rows = []
    for case in CASES:
        wall, cpu = (Ratio.of(*found[case.name][:, :, clock].T) for clock in (0, 1))
        goal = "" if case.goal is None else f"at least {case.goal:.2f}"
        rows.append(f"| {case.name} | {wall} | {cpu} | {len(found[case.name])} | {goal} |")
    times = [f"| {name} | {value:.3f} |" for name, value in steps.items()]
    plain_ms = 1e3 * float(np.median(np.concatenate([each[:, 0, 1] for each in found.values()])))
    lines = "\n".join
    return f"""# Logits processors inside vLLM

`benchmarks/vllm_processors.py` wrote this on {datetime.date.today()}: {processor_name()}, {os.cpu_count()} cores,
load {os.getloadavg()[0]:.0f} in the last minute, torch {torch.__version__}, {torch.get_num_threads()} thread(s).
SmolLM2-135M-Instruct, {ROWS} requests at a time, {NEW} tokens each. Two engines take turns step by
step, and change places halfway where they have the class; a plain step takes {plain_ms:.0f} ms of processor time.

Tokens per second, divided by those of plain requests, with the 95 % interval:

| requests | by wall time | by processor time | pairs of steps | goal |
| --- | --- | --- | --- | --- |
{lines(rows)}

| processor time of the class alone | ms |
| --- | --- |
{lines(times)}

The goal for {STEP_ROWS} typical chains is {STEP_TARGET_MS} ms. llguidance alone takes a token and
computes a mask for each row: it tries every token of the vocabulary where the length of a string is
bounded, as in this schema. A forward pass that takes less time, on more threads or a GPU, makes the same
step a larger share.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="batches of requests that count, of each engine (default: %(default)s)"
    )
    page = report(*run(parser.parse_args().rounds))
    RESULTS.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
