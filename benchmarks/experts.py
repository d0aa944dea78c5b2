"""Mixtures of experts against llama.cpp: layers of Qwen3-30B-A3B's shapes with random weights.

    benchmarks/peers.sh llama  # once
    .venv/bin/python benchmarks/experts.py  # ten minutes on a machine that does nothing else
    .venv/bin/python benchmarks/experts.py --layers 2 --rounds 1 --no-results

Prints, and writes `results/experts.md`. Both read one GGUF file of random blocks in Q4_0, with
fewer layers than the model's 48, so that it fits this machine's memory: 128 experts a layer, of
which a token has 8. Its router is random, too, so that 8 rows meet some 52 experts of each layer,
more than texts of one subject do. Columns and rounds are those of `quantised.py`; `floor` is a step
that does nothing but read the weights that its rows meet. Cases: ``1`` and ``8`` prompts of 64
tokens, of whose answers 32 and 16 tokens are timed, and one prompt of 512 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import decode_ours  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import numpy as np
import quantised
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from machine import processor_name
from workload import HERE, Reply, Task, peer

from worker.models.checkpoint import convert_gguf

REPORT = HERE / "results" / "experts.md"
ARCH = "qwen3moe"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, USED, INNER, VOCABULARY = 2048, 32, 4, 128, 128, 8, 768, 151_936
CASES = {
    "1": Task(1, 64, 32, "greedy", 0),
    "8": Task(8, 64, 16, "greedy", 0),
    "prompt": Task(1, 512, 1, "greedy", 0),
}
COLUMNS = (quantised.EXACT, "float32, int8 activations")
_BLOCK = 32
_BLOCK_BYTES = 18
"""Bytes of a block of Q4_0: a scale in float16 and 32 weights of 4 bits."""


def matrices(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in blocks."""
    yield "token_embd.weight", (VOCABULARY, HIDDEN)
    yield "output.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        for name, shape in (
            ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
            ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
            ("ffn_gate_exps", (EXPERTS, INNER, HIDDEN)),
            ("ffn_up_exps", (EXPERTS, INNER, HIDDEN)),
            ("ffn_down_exps", (EXPERTS, HIDDEN, INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", shape


def random_blocks(shape: tuple[int, ...], source: np.random.Generator) -> np.ndarray:
    """Blocks of weights whose rows keep the size of what they are multiplied by."""
    found = source.integers(0, 256, (*shape[:-1], shape[-1] // _BLOCK, _BLOCK_BYTES), np.uint8)
    scale = np.float16(shape[-1] ** -0.5 / 4.6)  # codes are -8 to 7
    found[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return found.reshape(*shape[:-1], -1)


def write_model(path: Path, layers: int) -> Path:
    """A GGUF file with a byte-level vocabulary that is filled up with unused tokens."""
    writer, source = GGUFWriter(path, ARCH), np.random.default_rng(7)
    writer.add_block_count(layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_expert_feed_forward_length(INNER)
    _add_vocabulary(writer)
    for name, shape in matrices(layers):
        writer.add_tensor(name, random_blocks(shape, source), raw_dtype=GGMLQuantizationType.Q4_0)
    for layer in range(layers):
        router = source.standard_normal((EXPERTS, HIDDEN), np.float32) * np.float32(HIDDEN**-0.5)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        for name, width in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), *((f"attn_{x}_norm", HEAD_DIM) for x in "qk")):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *letters, "Ġt"]
    unused = [f"[PAD{number}]" for number in range(len(tokens), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([3, *[1] * (len(tokens) - 1), *[5] * len(unused)])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(0)


def bytes_of_a_step(rows: int, layers: int) -> float:
    """Bytes of weights that rows with random experts meet in a step, on average."""
    met = {"token_embd.weight": 0.0}
    share = 1 - (1 - USED / EXPERTS) ** rows
    sizes = {name: int(np.prod(shape)) / _BLOCK * _BLOCK_BYTES for name, shape in matrices(layers)}
    return sum(met.get(name, share if "_exps" in name else 1.0) * size for name, size in sizes.items())


def render(rows: list[quantised.Row], load: float, arguments: argparse.Namespace) -> str:
    """The document."""
    lines = [
        "# Experts",
        "",
        f"Made by `benchmarks/experts.py`, which says what the cases are, on {datetime.date.today()}:",
        f"{arguments.layers} layers of Qwen3-30B-A3B's shapes with random weights in Q4_0, --kernels",
        f"{arguments.kernels}, {processor_name()},",
        f"{arguments.threads} threads, load before {load:.1f}; the fastest of {arguments.rounds} interleaved rounds,",
        "tokens per second, and ratios to llama.cpp.",
        "",
        *quantised.table(
            "case", quantised.FLOOR, "llama.cpp", *(title for name in COLUMNS for title in (name, "ratio"))
        ),
    ]
    for row in rows:
        cells = [f"{row.best[name]:.1f}" if name in row.best else "-" for name in (quantised.FLOOR, "llama.cpp")]
        for name in COLUMNS:
            cells += [f"{row.best[name]:.1f}", f"{row.best[name] / row.best['llama.cpp']:.2f}"]
        lines.append(f"| {row.case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="as of the worker")
    parser.add_argument("--llama", type=Path, default=HERE.parent / ".venv-llama/bin/python")
    parser.add_argument("--folder", type=Path, help="where the model is kept between runs; by default it is removed")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    arguments = parser.parse_args()
    if not arguments.llama.is_file():
        raise SystemExit("llama.cpp is not installed; benchmarks/peers.sh llama installs it")
    load = os.getloadavg()[0]
    torch.set_num_threads(arguments.threads)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / f"experts-{arguments.layers}.gguf"
        if not path.is_file():
            write_model(path, arguments.layers)
        checkpoint = convert_gguf(path, folder / "cache", quantised.say, keeps_blocks=True)
        answers: dict[str, Callable[[Task], Reply]] = {
            name: functools.partial(decode_ours.answer, quantised.engine_of(checkpoint, name, arguments))
            for name in COLUMNS
        }
        answers["llama.cpp"] = stack.enter_context(peer(arguments.llama, path, arguments.threads, "decode_llama.py"))
        gc.collect()
        gc.freeze()  # as the worker does: a large vocabulary is garbage-collected for milliseconds otherwise
        for case in arguments.cases:
            row = quantised.Row("Q4_0", case)
            step = bytes_of_a_step(CASES[case].rows, arguments.layers)
            quantised.measure(row, CASES[case], answers, arguments.rounds, int(step))
            rows.append(row)
            print(case, {name: round(found, 1) for name, found in row.best.items()}, flush=True)
    text = render(rows, load, arguments)
    print(text)
    if not arguments.no_results:
        REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
