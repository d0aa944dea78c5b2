"""The embedded engine on a GPU beside transformers, and the price of exact numerics there.

    .venv/bin/python benchmarks/gpu.py               # everything; five minutes
    .venv/bin/python benchmarks/gpu.py --rows 1 32   # some numbers of rows

Prints each measurement, and writes `results/gpu.md` and `results/gpu.json`. The model is a Llama of
1.2 B random parameters in bfloat16, written to a directory that goes away.

Cases: 1, 32 and 128 prompts of 128 tokens, and 1 and 32 of 1,024, each with 128 new tokens, greedy;
32 with temperature, top-k and top-p; 32 with a chain of three processors. Of each the tokens per
second with the prompt in it, and the median time of a step in which all rows decode. `floor` is the
time in which the GPU reads the weights and the KV of such a step, as fast as it copies memory.
transformers' `generate` runs with a static batch and its default cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from worker.engines.embedded import Engine
from worker.engines.embedded.plan import Edits, Plan, Request
from worker.engines.embedded.sampling.sampler import Sampler
from worker.sampling import SamplingParams

RESULTS = Path(__file__).parent / "results"
NEW = 128
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
CHAIN: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}
LAYERS, HIDDEN, KV_WIDTH, VOCABULARY = 16, 2048, 512, 128_256
SAMPLER_ROWS, SAMPLER_WIDTH = 128, 151_936


@dataclass(frozen=True, slots=True)
class Case:
    """What is generated.

    Attributes:
        name: Name of the case in the table.
        rows: Prompts at a time.
        prompt: Tokens of each.
        controls: Fields of `SamplingParams`.
    """

    name: str
    rows: int
    prompt: int
    controls: dict[str, Any]

    def prompts(self) -> list[list[int]]:
        """Random prompts, new ones in each round."""
        return torch.randint(5, VOCABULARY - 5, (self.rows, self.prompt)).tolist()

    def floor_ms(self, bandwidth: float, weight_bytes: int) -> float:
        """Time in which a step's weights and KV are read, with half of the answer behind it."""
        kv = self.rows * (self.prompt + NEW // 2) * LAYERS * 2 * KV_WIDTH * 2
        return 1e3 * (weight_bytes + kv) / bandwidth


CASES = [
    Case("1", 1, 128, {}),
    Case("32", 32, 128, {}),
    Case("128", 128, 128, {}),
    Case("1 of 1,024", 1, 1024, {}),
    Case("32 of 1,024", 32, 1024, {}),
    Case("32 sampled", 32, 128, SAMPLED),
    Case("32 with a chain", 32, 128, CHAIN),
]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement: seconds of a whole case, and milliseconds of a decode step."""

    seconds: float
    step_ms: float


def write_checkpoint(path: Path) -> int:
    """Write the model; returns the bytes of weights that a step reads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        network: Any = LlamaForCausalLM(config)
        network.to(torch.bfloat16)
    network.save_pretrained(path)
    return 2 * sum(int(parameter.numel()) for parameter in network.parameters())


def ours(engine: Engine, case: Case) -> Figure:
    """One round of the engine."""
    for prompt in case.prompts():
        engine.add(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, **case.controls))
    steps = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    while engine.unfinished:
        before = time.perf_counter()
        events = engine.session.step()
        if len(events) == case.rows:
            steps.append(time.perf_counter() - before)
    return Figure(time.perf_counter() - began, 1e3 * statistics.median(steps[1:]))


def transformers(network: Any, case: Case) -> Figure:
    """One round of transformers' `generate`."""
    ids = torch.tensor(case.prompts(), device="cuda")
    controls = {"do_sample": False} if not case.controls else {"do_sample": True, **case.controls}
    named = {"attention_mask": torch.ones_like(ids), "min_new_tokens": NEW, "max_new_tokens": NEW, **controls}
    torch.cuda.synchronize()
    began = time.perf_counter()
    network.generate(ids, **named)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Figure(seconds, 1e3 * seconds / NEW)


def best(measure: Callable[[Case], Figure], case: Case, rounds: int) -> Figure:
    """The fastest of some rounds, behind one that captures graphs and compiles kernels."""
    measure(case)
    return min((measure(case) for _ in range(rounds)), key=lambda figure: figure.seconds)


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, stop = _event(), _event()
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(2 * len(source) / min(times))


def sampler_ms(controls: dict[str, Any]) -> float:
    """Median time in which tokens of rows on the device are sampled."""
    logits = torch.randn(SAMPLER_ROWS, SAMPLER_WIDTH, device="cuda") * 3
    params = SamplingParams(seed=1, **controls)
    requests = tuple(Request(str(row), row, params, [1, 2], 2, 99, frozenset(), row) for row in range(SAMPLER_ROWS))
    plan, sampler = Plan(requests, (), requests), Sampler(SAMPLER_WIDTH, ())
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        sampler.sample(logits, Edits(), plan)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = sorted({case.rows for case in CASES})
    parser.add_argument("--rows", type=int, nargs="+", choices=known, help="rows that are measured; default: all")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a case, of which the fastest counts")
    options = parser.parse_args()
    cases = [case for case in CASES if options.rows is None or case.rows in options.rows]
    name, speed = torch.cuda.get_device_name(), bandwidth()
    found: dict[str, dict[str, Figure]] = {case.name: {} for case in cases}
    with tempfile.TemporaryDirectory() as directory:
        weight_bytes = write_checkpoint(Path(directory))
        for numerics in ("exact", "fast"):
            settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "numerics": numerics}
            engine = Engine(directory, max_num_seqs=128, context_length=2048, max_num_batched_tokens=8192, **settings)
            for case in cases:
                found[case.name][numerics] = best(partial(ours, engine), case, options.rounds)
                print(case.name, numerics, found[case.name][numerics], flush=True)
            del engine
            torch.cuda.empty_cache()
        network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        network.to("cuda")
        for case in cases:
            if case.controls is not CHAIN:
                figure = best(partial(transformers, network), case, 1)
                found[case.name]["transformers"] = figure
                print(case.name, "transformers", figure, flush=True)
    of_sampler = {
        title: sampler_ms(controls)
        for title, controls in {"greedy": {}, "top-k and top-p": SAMPLED, "temperature": {"temperature": 1.0}}.items()
    }
    lines = [f"# On a GPU\n\n{name}, torch {torch.__version__}; copies at {speed / 1e12:.2f} TB/s.\n"]
    lines += [
        "| rows | floor, ms | exact, ms | of the floor | exact / fast | tokens/s | times transformers |",
        "|---" * 7 + "|",
    ]
    for case in cases:
        row, floor = found[case.name], case.floor_ms(speed, weight_bytes)
        exact, fast, peer = row["exact"], row["fast"], row.get("transformers")
        lines.append(
            f"| {case.name} | {floor:.2f} | {exact.step_ms:.2f} | {floor / exact.step_ms:.2f} | "
            f"{exact.seconds / fast.seconds:.2f} | {case.rows * NEW / exact.seconds:,.0f} | "
            f"{'' if peer is None else f'{peer.seconds / exact.seconds:.1f}'} |"
        )
    reads = 1e3 * SAMPLER_ROWS * SAMPLER_WIDTH * 4 / speed
    shown = ", ".join(f"{title} {value:.2f} ms" for title, value in of_sampler.items())
    lines.append(
        f"\nSampling {SAMPLER_ROWS} rows of {SAMPLER_WIDTH:,} logits, one read of which takes {reads:.2f} ms: {shown}."
    )
    print("\n".join(lines))
    (RESULTS / "gpu.md").write_text("\n".join(lines) + "\n")
    kept = {"gpu": name, "sampler_ms": of_sampler}
    kept["cases"] = {key: {who: asdict(each) for who, each in value.items()} for key, value in found.items()}
    (RESULTS / "gpu.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
