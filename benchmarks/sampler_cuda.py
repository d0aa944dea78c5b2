"""The sampler on a GPU: `benchmarks/sampler.py --device cuda`.

Times are the device's own, between two events, the fastest of some rounds. Rounds are interleaved,
on the same logits.

- read: the maximum of each row, the cheapest operation that reads every logit.
- launch: `Sampler.launch`, from logits to the copy of the tokens. It is run once with PyTorch's
  check for synchronisation set to fail.
- graph: truncation and sampling alone, captured in a CUDA graph.
- sorting: the same with prefixes found by sorting instead of the Triton kernel.
- flashinfer: `flashinfer.sampling`, where it is installed and has the same controls. It uses
  rejection sampling, a stateful generator and float32 sums; ours is exact, with counter-based
  random numbers.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sampler import Case, cases, plan_of

from adapters.sampling.prefixes import Select, select_by_sorting
from worker.engines.embedded.plan import Edits
from worker.engines.embedded.sampling.device_truncation import truncate_and_sample_rows
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.sampling.selection_kernels import choose_select

Work = Callable[[], object]

VOCAB_SIZE = 151_936
BATCH_SIZES = (1, 8, 32, 64, 128, 256)
COLUMNS = ("read", "launch", "graph", "sorting", "flashinfer")
HEADER = (
    "| controls | B | "
    + ", µs | ".join(COLUMNS)
    + ", µs | launch / read | flashinfer / launch |\n"
    + "| --- " * 9
    + "|"
)


def seconds_of(work: Work, device: torch.device) -> float:
    """Seconds of one call on the device; on the CPU, for trying it out, wall time."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def fastest(works: dict[str, Work], device: torch.device, num_rounds: int) -> dict[str, float]:
    """Seconds of each one's fastest round, after one to warm up; run in turn."""
    best = dict.fromkeys(works, math.inf)
    for work in works.values():
        work()
    for _ in range(num_rounds):
        for name, work in works.items():
            best[name] = min(best[name], seconds_of(work, device))
    return best


def graphed(work: Work) -> Work:
    """`work` as a CUDA graph's replay; capturing fails on a synchronisation."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def flashinfer_work(case: Case, logits: torch.Tensor) -> Work | None:
    """The same controls by `flashinfer.sampling`, as far as one call has them (no min-p)."""
    if importlib.util.find_spec("flashinfer") is None or logits.device.type != "cuda":
        return None
    from flashinfer import sampling

    params = case.params
    temperature = 1.0 if params.temperature is None else params.temperature
    if params.top_k:
        top_p = 1.0 if params.top_p is None else params.top_p
        return lambda: sampling.top_k_top_p_sampling_from_logits(logits / temperature, params.top_k, top_p)
    if params.top_p is not None and params.top_p < 1:
        return lambda: sampling.top_p_sampling_from_probs(sampling.softmax(logits, temperature), params.top_p)
    return lambda: sampling.sampling_from_logits(logits / temperature)


def works_of(case: Case, batch_size: int, device: torch.device, select: Select) -> dict[str, Work]:
    logits = case.make_logits(batch_size, VOCAB_SIZE).to(device)
    sampler, plan = Sampler(VOCAB_SIZE, (), device, sync_free=True), plan_of(case.params, batch_size)
    sampler.sample(logits, Edits(), plan)
    random_rows = sampler._table.random_rows
    padded = logits if random_rows.padded_index is None else logits.index_select(0, random_rows.padded_index)
    highest, uniforms = padded.amax(-1, keepdim=True), random_rows.uniforms()

    def draw(how: Select) -> Work:
        return lambda: truncate_and_sample_rows(padded, highest, random_rows.columns, uniforms, how)

    works: dict[str, Work] = {
        "read": lambda: logits.amax(-1),
        "launch": lambda: sampler.launch(logits, Edits(), plan),
        "sorting": draw(select_by_sorting),
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        works["launch"]()
        torch.cuda.set_sync_debug_mode("default")
        works["graph"] = graphed(draw(select))
    other = flashinfer_work(case, logits)
    if other is not None:
        works["flashinfer"] = other
    return works


def lines(device: torch.device, batch_sizes: Sequence[int], num_rounds: int) -> Iterator[str]:
    select = choose_select(device)
    for case in cases():
        for batch_size in batch_sizes:
            times = fastest(works_of(case, batch_size, device, select), device, num_rounds)
            shown = " | ".join(f"{1e6 * times[name]:,.1f}" if name in times else "-" for name in COLUMNS)
            ahead = f"{times['flashinfer'] / times['launch']:.2f}" if "flashinfer" in times else "-"
            yield f"| {case.name} | {batch_size} | {shown} | {times['launch'] / times['read']:.1f} | {ahead} |"


def run(arguments: argparse.Namespace, results: Path) -> None:
    """Measure, print and write `sampler-cuda.md`."""
    device = torch.device(arguments.device)
    print(HEADER)
    found = []
    with torch.inference_mode():
        for line in lines(device, BATCH_SIZES, arguments.rounds):
            print(line, flush=True)
            found.append(line)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    select = choose_select(device).__name__
    text = [
        "# What sampling costs on a GPU",
        f"Made by `.venv/bin/python benchmarks/sampler.py --device {arguments.device}`; `benchmarks/sampler_cuda.py` "
        f"says what is compared. V = {VOCAB_SIZE:,}, fastest of {arguments.rounds} interleaved rounds. Prefixes: "
        f"`{select}`.",
        "\n".join([HEADER, *found]),
        f"{datetime.date.today()}, {name}, torch {torch.__version__}.",
    ]
    results.mkdir(exist_ok=True)
    (results / "sampler-cuda.md").write_text("\n\n".join(text) + "\n")
