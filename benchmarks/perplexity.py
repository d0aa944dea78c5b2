"""What rounding activations costs: perplexity of the default model on 100,000 tokens of real text.

    benchmarks/peers.sh llama openvino  # once
    .venv/bin/python benchmarks/perplexity.py  # half an hour
    .venv/bin/python benchmarks/perplexity.py --windows 20 --no-results

Prints, and writes `results/perplexity.md`. The text is Python's own language reference, as
`pydoc_data.topics` of the standard library has it, in windows of 512 tokens of which each but the
first is predicted from all before it in the window. Every engine gets the same tokens. Ours,
llama.cpp and OpenVINO read the same GGUF files and keep their blocks packed; ``Q4_1`` is the file
as the package index has it, llama.cpp makes ``Q8_0`` of it.

``float32`` is ours with activations as they are (``--activation-dtype none``), that is the model
that the file describes: what the others lose, they lose by rounding activations, or by computing
in fewer bits. The interval is of the change, as a paired one: 1.96 standard errors of the mean
difference of log probabilities, from the means of windows, which are independent of each other.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import math
import os
import pydoc_data.topics
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import processor_name
from perplexity_peer import Scores, Window
from quantised import OWN, PEERS, say, table, write_formats
from workload import HERE, peer

from worker.engines.embedded import Engine, native
from worker.models import model_cache
from worker.models.checkpoint import convert_gguf
from worker.quantize.report import Predictions
from worker.sampling import SamplingParams

REPORT = HERE / "results" / "perplexity.md"
FORMATS = (OWN, "Q8_0")
LENGTH = 512
TRUTH = "float32"
OURS: dict[str, dict[str, Any]] = {
    TRUTH: {"dtype": "float32", "activation_dtype": "none"},
    "float32, int16 KV": {"dtype": "float32", "activation_dtype": "none", "kv_cache_dtype": "int16"},
    "float32, int8 activations, float32 KV": {"dtype": "float32", "activation_dtype": "int8", "kv_cache_dtype": "none"},
    "float32, int8 activations": {"dtype": "float32", "activation_dtype": "int8"},
    "bfloat16, int8 activations": {"dtype": "bfloat16", "activation_dtype": "int8"},
}
"""Settings of `EmbeddedConfig`, by the name of a column."""
if native.no_bfloat16_rows() is None:
    for dtype in ("float32", "bfloat16"):
        OURS[f"{dtype}, bfloat16 activations"] = {"dtype": dtype, "activation_dtype": "bfloat16"}
THEIRS = ("llama.cpp", "OpenVINO")


def windows_of(engine: Engine, most: int) -> list[Window]:
    """Whole windows of the text."""
    topics = pydoc_data.topics.topics
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    starts = range(0, len(ids) - LENGTH + 1, LENGTH)
    return [Window(ids[start : start + LENGTH]) for start in starts][:most]


def ours(engine: Engine, window: Window) -> Scores:
    """Scores of an engine of ours."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, top_k=1)
    [result] = engine.generate([window.tokens], params, progress=False)
    found = Predictions([], [])
    found.add(result)
    return Scores(found.logprobs, found.most_likely)


def row(form: str, name: str, found: list[Scores], truth: list[Scores]) -> str:
    """A row of the report."""
    mean = statistics.fmean(statistics.fmean(each.logprobs) for each in found)
    lost = [
        statistics.fmean(before.logprobs) - statistics.fmean(after.logprobs)
        for before, after in zip(truth, found, strict=True)
    ]
    change, error = statistics.fmean(lost), 1.96 * statistics.stdev(lost) / math.sqrt(len(lost))
    alike = [
        one == another
        for before, after in zip(truth, found, strict=True)
        for one, another in zip(before.likeliest, after.likeliest, strict=True)
    ]
    told = f"{math.exp(-mean):.3f}"
    if found is truth:
        return f"| {form} | {name} | {told} | | |"
    low, high = (100 * math.expm1(change + sign * error) for sign in (-1, 1))
    share = 100 * statistics.fmean(alike)
    return f"| {form} | {name} | {told} | {100 * math.expm1(change):+.2f} ({low:+.2f} to {high:+.2f}) | {share:.1f} |"


def render(rows: list[str], num_windows: int) -> str:
    """The document."""
    lines = [
        "# Perplexity",
        "",
        f"Made by `benchmarks/perplexity.py`, which says what is measured, on {datetime.date.today()}: the default",
        f"model, {num_windows} windows of {LENGTH} tokens ({num_windows * (LENGTH - 1):,} predictions), "
        f"{processor_name()}.",
        "",
        *table("format", "computed by", "perplexity", "change in per cent", "the same likeliest token, per cent"),
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--windows", type=int, default=1000, help="at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", choices=THEIRS, default=list(THEIRS), metavar="PEER")
    parser.add_argument("--no-results", action="store_true", help="print, and leave the results as they are")
    arguments = parser.parse_args()
    if arguments.windows < 2:  # of one there is no interval
        parser.error(f"argument --windows: must be at least 2, got {arguments.windows}")
    pythons = {name: HERE.parent / f".venv-{PEERS[name].environment}/bin/python" for name in PEERS}
    torch.set_num_threads(arguments.threads)
    rows, windows = [], list[Window]()
    with tempfile.TemporaryDirectory() as directory:
        for form, path in write_formats(Path(directory), arguments.formats, pythons["llama.cpp"]).items():
            checkpoint = convert_gguf(path, model_cache(os.environ), say, keeps_blocks=True)
            truth: list[Scores] = []
            for name in (*OURS, *arguments.peers):
                with contextlib.ExitStack() as stack:
                    score: Callable[[Window], Scores]
                    if name in OURS:
                        engine = Engine(
                            checkpoint, device="cpu", context_length=LENGTH + 1, max_num_seqs=1, **OURS[name]
                        )
                        windows = windows or windows_of(engine, arguments.windows)
                        score = functools.partial(ours, engine)
                    else:
                        score = stack.enter_context(
                            peer(pythons[name], path, arguments.threads, "perplexity_peer.py", name, kind=Scores)
                        )
                    found = [score(window) for window in windows]
                truth = truth or found
                rows.append(row(form, name, found, truth))
                print(rows[-1], flush=True)
    text = render(rows, len(windows))
    print(text)
    if not arguments.no_results:
        REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
