"""What LoRA adapters cost a step of the embedded engine: adapters beside none, in one run.

    .venv/bin/python benchmarks/lora.py                          # the default model, two minutes
    .venv/bin/python benchmarks/lora.py --model tiny --rounds 3

Steps of as many rows as there are adapters, behind prompts of 64 tokens; of rows without an
adapter, of rows of one, and of rows that have one each. Rounds of the cases are interleaved, and
the fastest step of each counts, since other work on the machine can only make a step slower.
Targets are peft's default, queries and values, and all linear layers. One thread computes, so that
its processor time is all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import decode_ours  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import torch
from safetensors.torch import save_file

from worker.engines.embedded import Engine
from worker.engines.embedded.config import LORA_DTYPES
from worker.engines.embedded.model import HfModel
from worker.sampling import SamplingParams

TARGETS = {
    "q, v": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
PROMPT_TOKENS = 64


def write_adapter(directory: Path, engine: Engine, targets: tuple[str, ...], rank: int, dtype: torch.dtype) -> Path:
    """An adapter of random matrices for the engine's model."""
    model = engine.session.stepper.model
    assert isinstance(model, HfModel)
    tensors = {}
    for tensor in model.geometry.tensors():
        layer = tensor.name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets and len(tensor.shape) == 2:
            rows, columns = tensor.shape
            tensors[f"base_model.model.{layer}.lora_A.weight"] = (torch.randn(rank, columns) / columns**0.5).to(dtype)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = (torch.randn(rows, rank) * 0.01).to(dtype)
    directory.mkdir(parents=True)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def step_ms(engine: Engine, names: list[str | None], steps: int) -> float:
    """Processor time of the fastest of some steps in which each of `names` decodes a row, ms."""
    params = SamplingParams(max_tokens=steps + 4, ignore_eos=True)
    for row, name in enumerate(names):
        engine.add([(97 * row + 7 * position) % 1000 + 20 for position in range(PROMPT_TOKENS)], params, adapter=name)
    stepper = engine.session.stepper
    while len(stepper.scheduler.queues.decoding) < len(names):
        engine.step()
    times = []
    for _ in range(steps):
        started_s = time.thread_time()
        engine.step()
        times.append(time.thread_time() - started_s)
    while engine.unfinished:
        engine.step()
    stepper.scheduler.cache.clear()
    return 1000 * min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="as of Engine: default, tiny or a path")
    parser.add_argument("--rows", type=int, default=8, help="rows and adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="float32", help="of the adapters' files"
    )
    parser.add_argument("--lora-dtype", choices=LORA_DTYPES, default="auto", help="of the adapters, once loaded")
    parser.add_argument("--compute", choices=("auto", "float32", "bfloat16"), default="auto", help="of the model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24, help="steps of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"dtype": options.compute, "lora_dtype": options.lora_dtype, "speculative_config": decode_ours.NO_DRAFTS}
    engine = Engine(options.model, max_num_seqs=options.rows, **settings)
    adapters = engine.session.stepper.adapters
    assert adapters is not None
    cases: dict[str, list[str | None]] = {"none": [None] * options.rows}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for targets, layers in TARGETS.items():
            names = [f"{targets} {index}" for index in range(options.rows)]
            for name in names:
                path = Path(folder) / name
                write_adapter(path, engine, layers, options.rank, getattr(torch, options.dtype))
                adapters.load(name, path)
            cases[f"{targets}: one adapter"] = [names[0]] * options.rows
            cases[f"{targets}: {options.rows} adapters"] = list(names)
    fastest = dict.fromkeys(cases, float("inf"))
    for _ in range(options.rounds):
        for case, chosen in cases.items():
            fastest[case] = min(fastest[case], step_ms(engine, chosen, options.steps))
    print(f"{engine.info.computed_by}; {options.rows} rows, rank {options.rank}")
    print(f"adapters of {options.dtype}, --lora-dtype {options.lora_dtype}; the model computes in {options.compute}")
    for case, milliseconds in fastest.items():
        print(f"{case:20} {milliseconds:7.2f} ms a step  {milliseconds / fastest['none']:5.2f}")


if __name__ == "__main__":
    main()
