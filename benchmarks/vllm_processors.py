"""Cost of the logits processors inside vLLM, as ratios within one run.

    scripts/install --vllm                               # once: vLLM's environment
    .venv-vllm/bin/python benchmarks/vllm_processors.py  # five minutes

SmolLM2-135M-Instruct on vLLM's CPU build, 16 requests at a time, 96 tokens each. Rounds of all
cases are interleaved, and the fastest of each counts, since other work on the machine can only make
a round slower. Compared are

* plain requests with `adapters.vllm:Processors` loaded, with those of an engine without it;
* json_schema and repetition_penalty on every row, with plain requests of the same engine, and with
  vLLM's own structured outputs beside its own penalty (xgrammar and guidance);
* the time of a step for 32 typical chains (bias, penalties, minimum length, JSON Schema), without
  any model, from vLLM's update to edited logits.

Results go to ``benchmarks/results/vllm_processors.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
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
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate

from adapters.vllm.processors import Processors
from worker.models import model_cache, prepare_default_model

RESULTS = Path(__file__).parent / "results" / "vllm_processors.md"
ROWS, NEW, STEP_ROWS = 16, 96, 32
TARGETS = {"loaded": 0.98, "chains": 0.90}
STEP_TARGET_MS = 1.0
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 60}},
    "required": ["items"],
    "additionalProperties": False,
}
"""Answers do not end before the last token."""
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


def engine(model: Path, backend: str, *, loaded: bool) -> LLM:
    """An engine with or without the processors."""
    return LLM(
        str(model),
        logits_processors=[Processors] if loaded else None,
        structured_outputs_config={"backend": backend},
        max_model_len=512,
        max_num_seqs=ROWS,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def tokens_per_s(llm: LLM, params: Callable[[], SamplingParams]) -> float:
    """Tokens per second of one round, prefill included."""
    began = time.perf_counter()
    outputs = llm.generate(PROMPTS, [params() for _ in PROMPTS], use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def step_ms(llm: LLM) -> tuple[float, float]:
    """Median milliseconds of a step with `STEP_ROWS` typical chains, and of one with a row."""
    config = llm.llm_engine.vllm_config
    width = config.model_config.get_vocab_size()
    typical = selection(
        ("logit_bias", {"bias": {str(i * 7 + 300): 1.5 for i in range(50)}}),
        ("repetition_penalty", {"penalty": 1.1}),
        ("frequency_penalty", {"penalty": 0.3}),
        ("min_tokens", {"n": 20}),
        ("json_schema", {"schema": SCHEMA}),
    )
    found = []
    for rows in (STEP_ROWS, 1):
        processors = Processors(config, torch.device("cpu"), False)
        outputs: list[list[int]] = [[] for _ in range(rows)]
        prompt = list(range(300, 428))
        added = [
            (n, SamplingParams(max_tokens=256, extra_args=typical), prompt, output) for n, output in enumerate(outputs)
        ]
        processors.update_state(BatchUpdate(rows, [], added, []))
        source = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        times = []
        for _ in range(80):
            logits = source.clone()
            began = time.perf_counter()
            processors.update_state(None)
            processors.apply(logits)
            times.append((time.perf_counter() - began) * 1e3)
            for output, token_id in zip(outputs, logits.argmax(-1).tolist(), strict=True):
                output.append(token_id)
        found.append(statistics.median(times[10:]))
    return found[0], found[1]


def run(rounds: int) -> dict[str, float]:
    """Best tokens per second of each case, and the milliseconds of a step."""
    model = prepare_default_model(model_cache(os.environ), lambda line: None)
    asked = cases()
    engines = {"stock": engine(model, "xgrammar", loaded=False), "loaded": engine(model, "guidance", loaded=True)}
    wanted = [
        ("stock, plain", "stock", "plain"),
        ("loaded, plain", "loaded", "plain"),
        ("loaded, chains", "loaded", "chains"),
        ("stock, xgrammar", "stock", "vLLM's"),
        ("loaded, guidance", "loaded", "vLLM's"),
    ]
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, which, case in wanted if number % 2 else reversed(wanted):
            found = tokens_per_s(engines[which], asked[case])
            if number:  # the first round compiles grammars
                best[name] = max(best.get(name, 0.0), found)
                print(f"round {number}: {name} {found:.0f} tokens/s", flush=True)
    best["step"], best["step of one"] = step_ms(engines["loaded"])
    return best


def report(best: dict[str, float]) -> str:
    """The page of results."""
    plain, loaded = best["stock, plain"], best["loaded, plain"]
    rows: list[Sequence[object]] = [
        ("class loaded, no processor / stock", f"{loaded / plain:.3f}", f"at least {TARGETS['loaded']}"),
        (
            "json_schema + repetition_penalty / plain",
            f"{best['loaded, chains'] / loaded:.3f}",
            f"at least {TARGETS['chains']}",
        ),
        ("vLLM's xgrammar + penalty / plain", f"{best['stock, xgrammar'] / plain:.3f}", ""),
        ("vLLM's guidance + penalty / plain", f"{best['loaded, guidance'] / loaded:.3f}", ""),
        (f"a step of {STEP_ROWS} typical chains, ms", f"{best['step']:.2f}", f"at most {STEP_TARGET_MS}"),
        ("a step of one, ms", f"{best['step of one']:.2f}", ""),
    ]
    table = "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
    figures = ", ".join(f"{name} {value:.0f}" for name, value in best.items() if not name.startswith("step"))
    return f"""# Logits processors inside vLLM

`benchmarks/vllm_processors.py` wrote this on {datetime.date.today()}: {processor()}, {os.cpu_count()} cores,
shared with other jobs, torch {torch.__version__}, {torch.get_num_threads()} threads. SmolLM2-135M-Instruct,
{ROWS} requests at a time, {NEW} tokens each, the fastest round of each case. Read the ratios, not the figures.

| what | found | goal |
| --- | --- | --- |
{table}

Tokens per second: {figures}.
"""


def processor() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count (default: %(default)s)")
    page = report(run(parser.parse_args().rounds))
    RESULTS.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
