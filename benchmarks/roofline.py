"""Where steps of the embedded engine lie below this processor's own peaks.

    .venv/bin/python benchmarks/roofline.py
    .venv/bin/python benchmarks/roofline.py --report benchmarks/results/roofline_zen5.md

Measures the processor first, with `roofline.c` compiled for it: operations on float32, bfloat16 and
int8 in registers, and the reading of memory, with all threads. Then decode steps of 1, 8, 32 and
128 rows, and a prompt of 1,024 tokens, of random Llamas of 125 M and 1.1 B parameters: with
bfloat16 weights, with int8 weights, and with int8 weights and activations. Prints tables and writes
them to `results/roofline.md`, or to the report of another processor, with a plot of the small model
in the `.svg` beside it; the steps
of peers in both are those of `results/decode.json`, where `decode.py` measured them on a processor
of this kind: the mean of an answer, with the prompt in it.

A step's operations are two for each weight and row, without attention; its bytes are its weights.
Of a prompt, a second figure counts attention, too: the products of a token with all before it, as
fast as the processor multiplies numbers of their type; those of 16 bits half as fast as int8. Each
figure is the best of some rounds, but for the reading of memory, which is the median of 60: the
host of a virtual machine lets it read twice as fast for moments. `outside` is the part of a step
that is not the model's forward pass: planning, sampling, handing over.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode_ours  # before torch, so that OpenMP's threads wait as they do in a worker

# isort: split
import torch
from checkpoint import LARGE, SMALL, Size, write_checkpoint
from machine import processor_name

from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ROWS = (1, 8, 32, 128)
PROMPT = 1024
VOCABULARY = 32_000
STEPS = {SMALL: 24, LARGE: 8}
"""New tokens of a request."""
TRIES = 5
"""Of a measurement in which no step had all rows."""
WAYS: dict[str, tuple[dict[str, Any], str, float]] = {
    "bfloat16": ({"dtype": "bfloat16"}, "bfloat16", 2.0),
    "int8 weights": ({"dtype": "float32", "quantization": "int8", "activation_dtype": "none"}, "float32", 1.0625),
    "int8 weights and activations": (
        {"dtype": "float32", "quantization": "int8", "activation_dtype": "int8"},
        "int8",
        1.0625,
    ),
}
"""Settings of the engine, the kind of its operations, and bytes of a weight with its scales."""
SLOWER = {"int8": 2.0}
"""By which attention's operations take longer than others of that kind: its codes have 16 bits."""

PEERS = {"vllm": "vLLM, bfloat16", "llama": "llama.cpp, bfloat16"}


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the processor can do.

    Attributes:
        operations: Operations per second by kind; 0 for what it has no instructions for.
        bandwidth: Bytes per second that it reads.
    """

    operations: dict[str, float]
    bandwidth: float

    def floor_s(self, kind: str, operations: float, bytes_: float) -> float:
        """The time that a step takes at least."""
        return max(operations / (self.operations[kind] or self.operations["float32"]), bytes_ / self.bandwidth)


@dataclass(frozen=True, slots=True)
class Point:
    """A step.

    Attributes:
        name: Who computed it, and how.
        rows: Rows of it.
        seconds: Duration of the step.
        operations: Operations in it.
        bytes: Bytes of weights that it reads.
        floor_s: See `Peaks.floor_s`.
        attention_s: Seconds by which a prompt's attention raises it; None of other steps.
        outside: Part of the time that is not the forward pass; None where nobody knows.
    """

    name: str
    rows: int
    seconds: float
    operations: float
    bytes: float
    floor_s: float
    attention_s: float | None = None
    outside: float | None = None


def measure_peaks(directory: Path) -> Peaks:
    """Compile `roofline.c` for this processor and call it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("roofline.py: there is no C compiler")
    library = directory / "roofline.so"
    options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w", "-o", str(library)]
    subprocess.run([compiler, *options, str(HERE / "roofline.c")], check=True)
    loaded = ctypes.CDLL(str(library))
    operations: dict[str, float] = {}
    for kind in ("float32", "bfloat16", "int8"):
        function = getattr(loaded, f"{kind}_peak")
        function.restype = ctypes.c_double
        operations[kind] = max(function() for _ in range(5))
    loaded.read_peak.restype = ctypes.c_double
    return Peaks(operations, statistics.median(loaded.read_peak() for _ in range(60)))


def measure(engine: Engine, rows: int, prompt: int, new: int) -> tuple[float, float]:
    """Seconds of a step, the best of them where there are several, and of its forward pass.

    Raises:
        SystemExit: other work on the machine kept rows from computing together, again and again.
    """
    skipped = 2 if new > 1 else 0  # steps behind prompts
    for _ in range(TRIES):
        chosen = whole_steps(engine, rows, prompt, new)[skipped:]
        if chosen:
            seconds = min(total for total, _ in chosen)
            return seconds, seconds - statistics.median(total - of_forward for total, of_forward in chosen)
    raise SystemExit(f"roofline.py: no steps of {rows} rows: the machine does other work")


def whole_steps(engine: Engine, rows: int, prompt: int, new: int) -> list[tuple[float, float]]:
    """The steps in which all rows get a token: seconds of each, and of its forward pass."""
    model = engine.session.stepper.model
    forward, inside = model.forward, [0.0]

    def timed(plan: Any) -> torch.Tensor:
        began = time.perf_counter()
        logits = forward(plan)
        inside[0] = time.perf_counter() - began
        return logits

    steps: list[tuple[float, float]] = []
    model.forward = timed  # type: ignore[method-assign]
    try:
        for ids in torch.randint(5, 31_000, (rows, prompt)).tolist():  # new ones, that no prefix cache has
            engine.add(ids, SamplingParams(max_tokens=new, ignore_eos=True))
        while engine.unfinished:
            began = time.perf_counter()
            events = engine.session.step()
            if len(events) == rows:
                steps.append((time.perf_counter() - began, inside[0]))
    finally:
        model.forward = forward  # type: ignore[method-assign]
    return steps


def ours(checkpoint: Path, size: Size, weights: float, peaks: Peaks) -> list[Point]:
    """Steps of the engine, in all ways."""
    head = VOCABULARY * size.hidden  # weights of the LM head
    # Scores and results, two for each product.
    of_attention = size.layers * 4 * size.hidden * PROMPT * (PROMPT + 1) / 2
    points: list[Point] = []
    for name, (settings, kind, bytes_per_weight) in WAYS.items():
        engine = Engine(
            str(checkpoint),
            device="cpu",
            max_num_seqs=max(ROWS),
            context_length=PROMPT + 64,
            max_num_batched_tokens=PROMPT,
            speculative_config=decode_ours.NO_DRAFTS,
            **settings,
        )
        read = weights * bytes_per_weight
        for rows in ROWS:
            seconds, inside = min(measure(engine, rows, 32, STEPS[size]) for _ in range(2))
            operations = 2 * weights * rows
            floor_s = peaks.floor_s(kind, operations, read)
            points.append(Point(name, rows, seconds, operations, read, floor_s, outside=1 - inside / seconds))
            print(f"{name}, {rows} rows: {1e3 * seconds:.2f} ms, {floor_s / seconds:.2f} of the peak", flush=True)
        seconds, _ = min(measure(engine, 1, PROMPT, 1) for _ in range(3))
        operations = 2 * ((weights - head) * PROMPT + head)  # logits are those of the last token alone
        floor_s = peaks.floor_s(kind, operations, read)
        attention_s = SLOWER.get(kind, 1.0) * peaks.floor_s(kind, of_attention, 0.0)
        points.append(Point(f"{name}, prompt", PROMPT, seconds, operations, read, floor_s, attention_s))
        shares = f"{floor_s / seconds:.2f} of the peak, with attention {(floor_s + attention_s) / seconds:.2f}"
        print(f"{name}, prompt: {1e3 * seconds:.1f} ms, {shares}", flush=True)
        del engine
    return points


def of_peers(weights: float, peaks: Peaks) -> list[Point]:
    """Mean steps of peers on the same model and processor, from `results/decode.json`."""
    kept = json.loads((RESULTS / "decode.json").read_text())["random"]
    points = []
    for peer, name in PEERS.items():
        for rows in (1, 8, 32):
            found = kept.get(str(rows), {"machine": ""})
            speeds = found["speeds"].get(peer) if found["machine"].startswith(processor_name()) else None
            if speeds:
                operations = 2 * weights * rows
                floor_s = peaks.floor_s("bfloat16", operations, 2 * weights)
                points.append(Point(name, rows, rows / max(speeds), operations, 2 * weights, floor_s))
    return points


def plot(points: Sequence[Point], peaks: Peaks) -> str:
    """Operations per second over operations per byte, both logarithmic, as SVG."""
    width, height, left, bottom = 840, 440, 70, 390
    low_x, high_x, low_y = 0.5, 4096.0, 3e9
    high_y = 1.5 * max(peaks.operations.values())

    def x_of(intensity: float) -> float:
        return left + (width - left - 200) * math.log(intensity / low_x) / math.log(high_x / low_x)

    def y_of(speed: float) -> float:
        return bottom - (bottom - 30) * math.log(speed / low_y) / math.log(high_y / low_y)

    colours = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")
    lines = []
    for kind, peak in peaks.operations.items():
        if peak:
            knee = peak / peaks.bandwidth
            corners = [(low_x, low_x * peaks.bandwidth), (knee, peak), (high_x, peak)]
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in corners)
            lines.append(f'<polyline points="{path}" fill="none" stroke="#999"/>')
            label = f"{kind}, {peak / 1e9:,.0f} G/s"
            lines.append(f'<text x="{x_of(high_x) + 6:.0f}" y="{y_of(peak) + 4:.0f}" fill="#666">{label}</text>')
    names = list(dict.fromkeys(point.name.removesuffix(", prompt") for point in points))
    for point in points:
        colour = colours[names.index(point.name.removesuffix(", prompt"))]
        x, y = x_of(point.operations / point.bytes), y_of(point.operations / point.seconds)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
    for row, name in enumerate(names):
        lines.append(f'<circle cx="{left + 16}" cy="{40 + 18 * row}" r="4" fill="{colours[row]}"/>')
        lines.append(f'<text x="{left + 26}" y="{44 + 18 * row}">{name}</text>')
    for power in range(13):
        x = x_of(2**power)
        lines.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{2**power}</text>')
    lines.append(f'<text x="{left + 250}" y="{bottom + 38}" text-anchor="middle">operations per byte of weights</text>')
    lines += [
        f'<text x="{left - 8}" y="{y_of(speed) + 4:.0f}" text-anchor="end">{speed / 1e9:.0f} G/s</text>'
        for speed in (1e10, 1e11, 1e12)
        if speed < high_y
    ]
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def report(sections: dict[str, Sequence[Point]], peaks: Peaks, plotted: str) -> str:
    """The page, with a plot in the file `plotted` beside it."""
    shown = ", ".join(f"{kind} {peak / 1e9:,.0f} G/s" for kind, peak in peaks.operations.items() if peak)
    lines = [
        "# Below the roof",
        "",
        "Made by `.venv/bin/python benchmarks/roofline.py`, which says what is measured. On a virtual machine",
        "the speed of memory changes from minute to minute: a step that reads weights alone may be above its peak.",
        "",
        f"{processor_name()}, {torch.get_num_threads()} threads: operations in registers {shown}; "
        f"memory {peaks.bandwidth / 1e9:.1f} GB/s.",
    ]
    for title, points in sections.items():
        lines += ["", f"## {title}", "", *table(points)]
    return "\n".join([*lines, "", f"![Speed over operations per byte, of the small model]({plotted})", ""])


def table(points: Sequence[Point]) -> list[str]:
    """The points in Markdown."""
    lines = [
        "| weights | rows | step, ms | floor, ms | of the peak | with attention | G operations/s | "
        "outside the forward pass |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for point in points:
        outside = "" if point.outside is None else f"{100 * point.outside:.0f} %"
        whole = "" if point.attention_s is None else f"{(point.floor_s + point.attention_s) / point.seconds:.2f}"
        lines.append(
            f"| {point.name} | {point.rows} | {1e3 * point.seconds:.2f} | {1e3 * point.floor_s:.2f} | "
            f"{point.floor_s / point.seconds:.2f} | {whole} | {point.operations / point.seconds / 1e9:,.0f} | "
            f"{outside} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=RESULTS / "roofline.md")
    page: Path = parser.parse_args().report
    drawing = page.with_suffix(".svg")
    with tempfile.TemporaryDirectory() as directory:
        peaks = measure_peaks(Path(directory))
    print(peaks, flush=True)
    sections: dict[str, Sequence[Point]] = {}
    for size, parameters in ((SMALL, "125 M parameters"), (LARGE, "1.1 B parameters")):
        with tempfile.TemporaryDirectory() as directory:
            weights = write_checkpoint(Path(directory), VOCABULARY, size=size) / 2
            points = ours(Path(directory), size, weights, peaks)
        sections[parameters] = points + (of_peers(weights, peaks) if size == SMALL else [])
    text = report(sections, peaks, drawing.name)
    print(text)
    page.write_text(text)
    drawing.write_text(plot(next(iter(sections.values())), peaks))


if __name__ == "__main__":
    main()
