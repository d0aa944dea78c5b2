"""Tokens per second of the embedded engine and its peers, on one random Llama of about 125 M parameters in bfloat16.

    .venv/bin/python benchmarks/decode.py [--vllm PYTHON]

Prints a table and writes it to `results/decode.md`. Everybody is asked for the same: 128 new tokens to each of 1, 8 and
32 random prompts of 128 tokens, on 2 threads; the time is that of the whole answer, prompt included. Peers take turns
with ours, round by round, with prompts that are new in each round, and the fastest round of each counts: other work on
the machine can only make a round slower. Read the ratios, not the figures.

- ours: `worker.engines.embedded.Engine`, with fast and with exact numerics, and sampled with temperature, top-k, top-p
  and min-p.
- transformers: `generate` on static batches, in this process.
- vLLM: its CPU build, compiled, in an environment of its own that ``--vllm`` names by its Python.
- floor: the time in which each step reads the weights once, as fast as this machine reads memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

HERE = Path(__file__).resolve().parent
BATCH_SIZES = (1, 8, 32)
PROMPT, NEW = 128, 128
VOCABULARY = 32_000
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
TARGETS = {"transformers": 1.5, "vLLM": 1.0, "vLLM, sampled": 1.6}
"""Least ratio of ours to theirs that is aimed at."""

Answer = Callable[[list[list[int]]], None]
"""Answers prompts with `NEW` tokens each."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Who answers; `rival_of` is the contender of ours that it is compared with, None for ours."""

    name: str
    answer: Answer
    rival_of: str | None = None


def write_checkpoint(path: Path) -> int:
    """Write the model; returns the bytes of weights that a step reads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(config).to(torch.bfloat16)
    network.save_pretrained(path)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return 2 * (parameters - network.model.embed_tokens.weight.numel())


def ours(path: Path, numerics: str, **controls: Any) -> Answer:
    engine = Engine(path, device="cpu", numerics=numerics, max_num_seqs=max(BATCH_SIZES), context_length=512)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, **controls)

    def answer(prompts: list[list[int]]) -> None:
        results = engine.generate(prompts, params, progress=False)
        _check(sum(len(result.token_ids) for result in results), len(prompts))

    return answer


def transformers(path: Path) -> Answer:
    loader: Any = AutoModelForCausalLM
    network = loader.from_pretrained(path, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def answer(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        found = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        _check(found.numel() - ids.numel(), len(prompts))

    return answer


def _check(num_tokens: int, rows: int) -> None:
    if num_tokens != rows * NEW:
        raise RuntimeError(f"{num_tokens} tokens came, {rows * NEW} were asked for")


@contextlib.contextmanager
def vllm(python: Path, checkpoint: Path, threads: int) -> Iterator[list[Contender]]:
    """vLLM in a process of its own, which answers a line ``rows seed sampled`` with a line when it is done."""
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": "",
    }
    command = [str(python), str(HERE / "decode_vllm.py"), str(checkpoint)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        sink, source = process.stdin, process.stdout
        assert sink is not None
        assert source is not None

        def asker(sampled: bool) -> Answer:
            def answer(prompts: list[list[int]]) -> None:
                print(len(prompts), prompts[0][0], int(sampled), file=sink, flush=True)
                _await_done(source)

            return answer

        _await_done(source)
        try:
            yield [
                Contender("vLLM", asker(False), "ours, fast"),
                Contender("vLLM, sampled", asker(True), "ours, sampled"),
            ]
        finally:
            sink.close()


def _await_done(lines: Any) -> None:
    for line in lines:
        if line == "done\n":
            return
    raise RuntimeError("vLLM ended early; its errors are above")


def measure(contenders: list[Contender], rounds: int) -> dict[tuple[str, int], float]:
    """Tokens per second of each contender and batch size, in its fastest round; one round before does not count."""
    source = random.Random(0)
    best: dict[tuple[str, int], float] = {}
    for round_number in range(rounds + 1):
        for rows in BATCH_SIZES:
            for each in contenders:
                prompts = [[source.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(rows)]
                started = time.perf_counter()
                each.answer(prompts)
                speed = rows * NEW / (time.perf_counter() - started)
                if round_number:
                    best[each.name, rows] = max(speed, best.get((each.name, rows), 0.0))
                print(f"round {round_number}: {each.name}, {rows} rows: {speed:.0f} tokens/s", flush=True)
    return best


def read_speed() -> float:
    """Bytes per second at which this process reads memory, at best."""
    block = torch.ones(64 * 2**20)
    best = 0.0
    for _ in range(20):
        started = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - started))
    return best


def report(
    contenders: list[Contender], speeds: dict[tuple[str, int], float], step_bytes: int, threads: int, rounds: int
) -> str:
    bandwidth = read_speed()
    floor = bandwidth / step_bytes
    today = datetime.datetime.now(tz=datetime.UTC).date()
    load = os.getloadavg()[0]
    lines = [
        "# Decoding speed",
        "",
        "Made by `.venv/bin/python benchmarks/decode.py`, which says what is compared, on "
        f"{today} ({platform.machine()}, {threads} threads, torch {torch.__version__}).",
        f"Fastest of {rounds} interleaved rounds; the load of the machine was {load:.1f} at the end. Tokens per second,"
        " prompts",
        f"included. Reading the weights once ({step_bytes / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s) takes",
        f"{1e3 / floor:.1f} ms: no step is shorter.",
        "",
        "| who | " + " | ".join(f"{rows} rows" for rows in BATCH_SIZES) + " |",
        "| --- |" + " --- |" * len(BATCH_SIZES),
    ]
    for each in contenders:
        lines.append(f"| {each.name} | " + " | ".join(f"{speeds[each.name, rows]:.0f}" for rows in BATCH_SIZES) + " |")
    lines.append("| floor | " + " | ".join(f"{floor * rows:.0f}" for rows in BATCH_SIZES) + " |")
    lines += ["", "| ratio | " + " | ".join(f"{rows} rows" for rows in BATCH_SIZES) + " | target |"]
    lines.append("| --- |" + " --- |" * (len(BATCH_SIZES) + 1))
    pairs = [(each.rival_of, each.name, TARGETS.get(each.name)) for each in contenders if each.rival_of]
    for one, other, target in [*pairs, ("ours, exact", "ours, fast", 0.9)]:
        ratios = " | ".join(f"{speeds[one, rows] / speeds[other, rows]:.2f}" for rows in BATCH_SIZES)
        lines.append(f"| {one} / {other} | {ratios} | {f'>= {target}' if target else ''} |")
    steps = " | ".join(f"{speeds['ours, fast', rows] / rows / floor:.2f}" for rows in BATCH_SIZES)
    lines.append(f"| ours, fast / floor | {steps} |  |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM's CPU build.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        checkpoint = Path(directory)
        step_bytes = write_checkpoint(checkpoint)
        contenders = [
            Contender("ours, fast", ours(checkpoint, "fast")),
            Contender("ours, exact", ours(checkpoint, "exact")),
            Contender("ours, sampled", ours(checkpoint, "fast", **SAMPLED)),
            Contender("transformers", transformers(checkpoint), "ours, fast"),
        ]
        if arguments.vllm is not None:
            contenders += stack.enter_context(vllm(arguments.vllm, checkpoint, arguments.threads))
        speeds = measure(contenders, arguments.rounds)
    text = report(contenders, speeds, step_bytes, arguments.threads, arguments.rounds)
    (HERE / "results" / "decode.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
