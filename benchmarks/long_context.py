"""Decoding behind long contexts, beside llama.cpp, with keys and values in 16 and in 8 bits.

    benchmarks/peers.sh llama                            # once: the environment for llama.cpp
    .venv/bin/python benchmarks/long_context.py          # half an hour, most of it prompts of 128 k
    .venv/bin/python benchmarks/long_context.py --contexts 8192 --rounds 3

One request behind a prompt of 8 k, 32 k and 128 k tokens, on a Llama of four layers with random
parameters in bfloat16, 12 heads on 4 of keys and values, and RoPE scaled to that length. The
prompt is computed once, but for llama.cpp, which would compute 128 k for hours: it computes 8 k and
gets copies of their keys and values for the rest. Then everybody decodes behind it in turns; the
fastest turn of each counts, since other work on the machine can only make one slower. Prints each
turn and writes `results/long_context.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import sys
import tempfile
from pathlib import Path

from checkpoint import SMALL, write_checkpoint
from decode import Answer
from machine import processor_name
from workload import HERE, Task, peer

REPORT = HERE / "results" / "long_context.md"
NEW = 33
SIZE = dataclasses.replace(SMALL, layers=4)
ROPE_FROM = 4096
"""Length that the model would be trained with."""
OURS, OURS_INT8 = "ours, bfloat16 KV", "ours, int8 KV"
PEERS = {"llama.cpp, float16 KV": "f16", "llama.cpp, bfloat16 KV": "bf16", "llama.cpp, Q8_0 KV": "q8_0"}
MOST = {"bf16": 8192}
"""Tokens up to which a peer is asked: llama.cpp rotates no keys in bfloat16, which copies need."""

Times = dict[tuple[str, int], list[float]]
"""Milliseconds of a step of each turn, by who decoded and the context."""


def measure(arguments: argparse.Namespace, checkpoint: Path, longest: int) -> Times:
    """Of all turns. One context after the other, so that little memory is taken."""
    times: Times = {}
    with contextlib.ExitStack() as stack:

        def start(python: Path, kv_type: str) -> Answer:
            script = "long_context_peer.py"
            return stack.enter_context(peer(python, checkpoint, arguments.threads, script, kv_type, str(longest)))

        answers = {OURS: start(Path(sys.executable), "none"), OURS_INT8: start(Path(sys.executable), "int8")}
        if arguments.llama.is_file():
            answers |= {name: start(arguments.llama, kv_type) for name, kv_type in PEERS.items()}
        else:
            print("llama.cpp: not installed (benchmarks/peers.sh llama installs it)")
        for context in arguments.contexts:
            task = Task(1, context, NEW, "greedy", context)
            asked = {
                name: answer for name, answer in answers.items() if context <= MOST.get(PEERS.get(name, ""), context)
            }
            for number in range(arguments.rounds + 1):
                for name, answer in asked.items():
                    reply = answer(task)
                    if number:  # the first turn computes the prompt
                        times.setdefault((name, context), []).append(1e3 * reply.decode_s / reply.decode_tokens)
                        print(f"  {context} tokens: {name}: {times[name, context][-1]:.2f} ms a step", flush=True)
    return times


def render(times: Times, arguments: argparse.Namespace) -> str:
    """`results/long_context.md`."""
    best = {key: min(each) for key, each in times.items()}
    names = list(dict.fromkeys(name for name, _ in best))
    lines = [
        "# Decoding behind long contexts",
        "",
        "Made by `.venv/bin/python benchmarks/long_context.py`, which says what is measured. Milliseconds of a",
        f"step, the fastest of {arguments.rounds} turns of {NEW - 1} steps, {arguments.threads} threads.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, {processor_name()}.",
        "",
        "| tokens of context | " + " | ".join(names) + " | fastest llama.cpp / ours | ours, bfloat16 / int8 KV |",
        "| --- |" + " --- |" * (len(names) + 2),
    ]
    for context in arguments.contexts:
        cells = [f"{best[name, context]:.2f}" if (name, context) in best else "-" for name in names]
        theirs = [best[name, context] for name in PEERS if (name, context) in best]
        mine = min(best[OURS, context], best[OURS_INT8, context])
        cells += [f"{min(theirs) / mine:.2f}" if theirs else "-"]
        cells += [f"{best[OURS, context] / best[OURS_INT8, context]:.2f}"]
        lines.append(f"| {context:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32_768, 131_072], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", type=Path, default=HERE.parent / ".venv-llama/bin/python")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    arguments = parser.parse_args()
    longest = max(arguments.contexts) + NEW
    longest += -longest % 256
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), longest=longest, size=SIZE, rope_factor=longest / ROPE_FROM)
        times = measure(arguments, Path(directory), longest)
    report = render(times, arguments)
    print(report)
    if not arguments.no_results:
        REPORT.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
