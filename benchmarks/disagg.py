"""What disaggregation costs and what it brings.

    .venv/bin/python benchmarks/disagg.py

All on this machine, with a Llama of about 100 million random parameters where a model is needed.

*Transfer*: whole pages of a store of 24 tensors are read out of another process's memory, as a
decode worker does it, and the same number of bytes are copied once, by one thread, out of memory
that both processes have mapped and the other one has written, in turn; both in huge pages, and no
page twice before all others. The target is 0.75 of the copy's speed. The worker reads with one
thread, or ``OMP_NUM_THREADS``; with ``UCX_TLS=all`` in the environment NIXL reads.

*First token*: two engines, prompts of several lengths; the time from the handle to the first token
at the decode engine, without the transfer and one decode step, which that token needs anywhere; the
target is 3 ms at most.

*Prompts between*: four answers are decoded while prompts of 2048 tokens arrive, one every few
seconds: by one engine with two threads, and by a prefill and a decode engine with one thread each.
The time between two tokens of an answer.

*Routing*: a frontend, two workers, and prompts with a common beginning of 1024 tokens, each sent
twice with another ending. The time to the second one's first token: round-robin sends it to the
worker that does not know the beginning, the KV router to the one that does; the target is a third
at most.

Prints tables of medians; `results/disagg.md` keeps the last ones.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; its own setting reaches one thread alone

import torch
from checkpoint import write_checkpoint
from disagg_routing import measure_routing
from machine import processor_name
from serve import end_on_sigterm

from worker.engines import EngineRequest, KeepKv, ReadKv
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.host_copy import HostProcess
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.transport import KvTransport
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

LAYOUT = KvLayout("benchmark", "bfloat16", layers=12, kv_heads=4, head_dim=64, block_size=16, page_size=256)
NUM_PAGES = 64
NUM_TENSORS = 2 * LAYOUT.layers
PAGE_ELEMENTS = LAYOUT.kv_heads * LAYOUT.page_size * LAYOUT.head_dim
SHARED_BYTES = NUM_TENSORS * NUM_PAGES * PAGE_ELEMENTS * 2
TRANSFER_TARGET = 0.75
FIRST_TOKEN_TARGET_MS = 3.0
ROUTING_TARGET = 3.0

NUM_STREAMS = 4
NUM_ARRIVALS = 6
ARRIVAL_INTERVAL_S = 5.0
LONG_PROMPT = 2048
PREFIX = 1024


class Child:
    """The other process: says and hears one line of JSON at a time."""

    def __init__(self, *arguments: str, keep: tuple[int, ...] = (), threads: int = 1) -> None:
        root = str(Path(__file__).resolve().parents[1])
        environ = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=environ,
            pass_fds=keep,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other process has ended")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def say(data: Any) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


def store(fill: float) -> list[torch.Tensor]:
    shape = (NUM_PAGES, LAYOUT.kv_heads, LAYOUT.page_size, LAYOUT.head_dim)
    tensors = host_memory.zeros(NUM_TENSORS, shape, torch.bfloat16, torch.device("cpu"))
    for tensor in tensors:
        tensor.fill_(fill)
    return tensors


def mapped(descriptor: int) -> torch.Tensor:
    """The memory that both processes have mapped, ``[tensors, pages, elements]``."""
    memory = mmap.mmap(descriptor, SHARED_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(NUM_TENSORS, NUM_PAGES, PAGE_ELEMENTS)


def lease_for_transfer(descriptor: int) -> None:
    """The child of the transfer: leases the pages asked for, until its input ends."""
    import select

    transport = KvTransport(store(1.0), LAYOUT)
    mapped(descriptor).fill_(2.0)
    leased: KvHandle | None = None
    while True:
        transport.poll()
        if not select.select([sys.stdin], [], [], 0.0005)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        if leased is not None:
            transport.revoke(leased)
        leased = transport.grant(json.loads(line))
        assert leased is not None
        say(asdict(replace(leased, metadata=b"")) | {"metadata": b64encode(leased.metadata).decode()})


def measure_transfer(rounds: int) -> list[tuple[str, float, float]]:
    """What is transferred, and the speed of the transfer and of the copy in bytes per second."""
    descriptor = os.memfd_create("kv")
    os.ftruncate(descriptor, SHARED_BYTES)
    child = Child("--child", "transfer", "--descriptor", str(descriptor), keep=(descriptor,))
    transport = KvTransport(store(0.0), LAYOUT)
    read_pages(transport, child, [0], [0])  # connects
    shared = mapped(descriptor)
    shared.sum()  # maps the pages
    numbers = random.Random(0)
    rows = []
    for count, scattered in ((1, False), (4, False), (16, False), (16, True)):
        speeds: tuple[list[float], list[float]] = ([], [])
        for round_number in range(rounds):
            first = round_number * count % NUM_PAGES
            source = list(range(first, first + count))
            target = [(each + NUM_PAGES // 2) % NUM_PAGES for each in source]
            if scattered:
                source, target = (numbers.sample(range(NUM_PAGES), count) for _ in range(2))
            num_bytes = count * PAGE_ELEMENTS * NUM_TENSORS * 2
            speeds[0].append(num_bytes / read_pages(transport, child, source, target))
            speeds[1].append(num_bytes / copy_once(transport.tensors, shared, source, target, scattered))
        name = f"{num_bytes / 2**20:.0f} MiB, {count} pages{', scattered' * scattered}"
        rows.append((name, statistics.median(speeds[0]), statistics.median(speeds[1])))
    child.end()
    return rows


def read_pages(transport: KvTransport, child: Child, source: list[int], target: list[int]) -> float:
    """Seconds of the read, from the handle to the fencing token that proves it."""
    data = child.ask(source)
    layout = KvLayout(**data.pop("layout"))
    process = None if data["process"] is None else HostProcess(**data["process"])
    handle = KvHandle(layout=layout, **(data | {"metadata": b64decode(data["metadata"]), "process": process}))
    began = time.perf_counter()
    read = transport.read(handle, target, 0, len(source) * LAYOUT.page_size)
    while (state := read.poll(1.0)) == "busy":
        pass
    took = time.perf_counter() - began
    read.release()
    if state != "done" or not all((tensor[target] == 1.0).all() for tensor in transport.tensors):
        raise RuntimeError(f"the transfer is {state}")
    return took


def copy_once(
    tensors: list[torch.Tensor], shared: torch.Tensor, source: list[int], target: list[int], scattered: bool
) -> float:
    """Seconds of one thread's copy of the same pages out of mapped memory; neighbours are one
    copy.
    """
    runs = [([one], [other]) for one, other in zip(source, target, strict=True)] if scattered else [(source, target)]
    pairs = [
        (tensor[to[0] : to[0] + len(to)].view(-1), part[of[0] : of[0] + len(of)].view(-1))
        for tensor, part in zip(tensors, shared, strict=True)
        for of, to in runs
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    for destination, origin in pairs:
        destination.copy_(origin)
    took = time.perf_counter() - began
    torch.set_num_threads(threads)
    if not all((destination == 2.0).all() for destination, _ in pairs):
        raise RuntimeError("the copy is wrong")
    return took


def engine(path: str, role: str) -> EmbeddedEngine:
    return EmbeddedEngine(EmbeddedConfig(model_path=path, device="cpu", role=role, max_num_seqs=8))


def random_prompt(numbers: random.Random, length: int) -> list[int]:
    return numbers.choices(range(300, 900), k=length)


async def prefill(path: str) -> None:
    """The child of the first token: computes prompts and says where their KV is."""
    worker = engine(path, "prefill")
    await worker.start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        prompt = json.loads(line)
        began = time.perf_counter()
        async for delta in worker.generate(
            EngineRequest(str(began), prompt, SamplingParams(max_tokens=1), kv=KeepKv())
        ):
            if delta.kv is not None:
                say({"kv": delta.kv, "seconds": time.perf_counter() - began})
    await worker.stop()


async def measure_first_token(path: str, rounds: int) -> list[tuple[int, float, float, float, float]]:
    """Prompt length, and in seconds: prefill, transfer, one decode step, and what else comes
    before the first token.
    """
    child = await asyncio.to_thread(Child, "--child", "prefill", "--model-path", path)
    worker = engine(path, "decode")
    await worker.start()
    rows = []
    numbers = random.Random(0)
    for length in (128, 512, 2048):
        found: list[tuple[float, float, float, float]] = []
        for round_number in range(rounds + 1):
            prompt = random_prompt(numbers, length)
            said = await asyncio.to_thread(child.ask, prompt)
            before = worker.transfers()["seconds"]
            times = [time.perf_counter()]
            params = SamplingParams(max_tokens=16, ignore_eos=True)
            asked = EngineRequest(f"{length} {round_number}", prompt, params, kv=ReadKv(said["kv"]))
            async for delta in worker.generate(asked):
                times += [time.perf_counter()] * len(delta.token_ids)
            transfer = worker.transfers()["seconds"] - before
            step = statistics.median(later - sooner for sooner, later in pairwise(times[1:]))
            if round_number:
                found.append((said["seconds"], transfer, step, times[1] - times[0] - transfer - step))
        rows.append((length, *(statistics.median(column) for column in zip(*found, strict=True))))
    await worker.stop()
    child.end()
    return rows


async def measure_gaps(path: str, disaggregated: bool, arrivals: int) -> tuple[list[float], float]:
    """Seconds between the tokens of `NUM_STREAMS` answers while `arrivals` long prompts come.

    Returns:
        The gaps, and the median time to first token of the prompts, in seconds.
    """
    child = await asyncio.to_thread(Child, "--child", "prefill", "--model-path", path) if disaggregated else None
    worker = engine(path, "decode" if disaggregated else "aggregated")
    await worker.start()
    numbers = random.Random(1)

    async def computed(prompt: list[int]) -> ReadKv | None:
        return None if child is None else ReadKv((await asyncio.to_thread(child.ask, prompt))["kv"])

    warm, over = asyncio.Event(), asyncio.Event()
    gaps: list[float] = []

    async def answer(number: int) -> None:
        prompt = random_prompt(numbers, 64)
        params = SamplingParams(max_tokens=3000, ignore_eos=True)
        last = None
        asked = EngineRequest(f"answer {number}", prompt, params, kv=await computed(prompt))
        async for delta in worker.generate(asked):
            now = time.perf_counter()
            if last is not None and delta.token_ids:
                gaps.append(now - last)
                if len(gaps) == 20 * NUM_STREAMS:
                    warm.set()
            last = now
            if over.is_set():
                return

    answers = [asyncio.create_task(answer(number)) for number in range(NUM_STREAMS)]
    await warm.wait()
    gaps.clear()

    async def arrive(number: int) -> float:
        await asyncio.sleep(number * ARRIVAL_INTERVAL_S)
        prompt = random_prompt(numbers, LONG_PROMPT)
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        asked = EngineRequest(f"prompt {number}", prompt, params, kv=await computed(prompt))
        async for delta in worker.generate(asked):
            if delta.token_ids:
                return time.perf_counter() - began
        raise RuntimeError("no token came")

    times = await asyncio.gather(*(arrive(number) for number in range(arrivals)))
    if not arrivals:
        await asyncio.sleep(ARRIVAL_INTERVAL_S)
    found = list(gaps)
    over.set()
    await asyncio.gather(*answers)
    await worker.stop()
    if child is not None:
        child.end()
    return found, statistics.median(times) if times else 0.0


def answer_gaps(path: str) -> None:
    """The child of the gaps: its environment says how many threads it has."""
    disaggregated, arrivals = json.loads(sys.stdin.readline())
    say(asyncio.run(measure_gaps(path, disaggregated, arrivals)))


def verdict(good: bool) -> str:
    return "yes" if good else "no"


def report_transfer(rounds: int, write: Callable[[str], object]) -> None:
    write("| KV | transfer, GB/s | one copy, GB/s | ratio | at least 0.75 |\n| ---: | ---: | ---: | ---: | --- |\n")
    for size, ours, copied in measure_transfer(rounds):
        shown = f"{ours / 1e9:.2f} | {copied / 1e9:.2f} | {ours / copied:.2f}"
        write(f"| {size} | {shown} | {verdict(ours / copied >= TRANSFER_TARGET)} |\n")


def report_first_token(path: str, rounds: int, write: Callable[[str], object]) -> None:
    write("\n| prompt | prefill, ms | transfer, ms | decode step, ms | the rest, ms | at most 3 |\n")
    write("| ---: | ---: | ---: | ---: | ---: | --- |\n")
    for length, *seconds in asyncio.run(measure_first_token(path, rounds)):
        shown = " | ".join(f"{1e3 * value:.1f}" for value in seconds)
        write(f"| {length} | {shown} | {verdict(1e3 * seconds[-1] <= FIRST_TOKEN_TARGET_MS)} |\n")


def report_gaps(path: str, write: Callable[[str], object]) -> None:
    write(f"\n| {NUM_STREAMS} answers: gaps | median, ms | p99, ms | longest, ms | first token of a prompt, s |\n")
    write("| --- | ---: | ---: | ---: | ---: |\n")
    for name, disaggregated, arrivals in (
        ("one engine, no prompts arrive", False, 0),
        ("one engine, prompts arrive", False, NUM_ARRIVALS),
        ("disaggregated, no prompts arrive", True, 0),
        ("disaggregated, prompts arrive", True, NUM_ARRIVALS),
    ):
        child = Child("--child", "gaps", "--model-path", path, threads=1 if disaggregated else 2)
        gaps, first = child.ask([disaggregated, arrivals])
        child.end()
        p99 = statistics.quantiles(gaps, n=100)[-1]
        shown = " | ".join(f"{1e3 * value:.1f}" for value in (statistics.median(gaps), p99, max(gaps)))
        write(f"| {name} | {shown} | {f'{first:.2f}' if arrivals else '-'} |\n")


def report_routing(path: str, rounds: int, write: Callable[[str], object]) -> None:
    missed, found = measure_routing(Path(path), rounds, PREFIX)
    ratio = missed / found
    write(
        "\n| first token of a known beginning of 1024 | round-robin's miss, ms | KV router, ms | ratio | at least 3 |\n"
    )
    write("| --- | ---: | ---: | ---: | --- |\n")
    shown = f"{1e3 * missed:.0f} | {1e3 * found:.0f} | {ratio:.1f}"
    write(f"| two workers, one thread each | {shown} | {verdict(ratio >= ROUTING_TARGET)} |\n")


PARTS = ("transfer", "first-token", "gaps", "routing")


def report(rounds: int, parts: list[str], write: Callable[[str], object]) -> None:
    write(f"{datetime.date.today()}, {processor_name()}, {os.cpu_count()} processors, torch {torch.__version__}, ")
    write(f"medians of {rounds} rounds.\n\n")
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model")
        write_tiny_model(Path(path))  # for its tokenizer
        write_checkpoint(Path(path), vocabulary=8192)
        if "transfer" in parts:
            report_transfer(rounds, write)
        if "first-token" in parts:
            report_first_token(path, rounds, write)
        if "gaps" in parts:
            report_gaps(path, write)
        if "routing" in parts:
            report_routing(path, min(rounds, 5), write)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    write(f"\nLoad averages at the end: {load}.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure KV transfer, first tokens, decode beside prefill, routing.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", choices=("transfer", "prefill", "gaps"), help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model-path", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    end_on_sigterm()
    if arguments.child == "transfer":
        lease_for_transfer(arguments.descriptor)
    elif arguments.child == "prefill":
        asyncio.run(prefill(arguments.model_path))
    elif arguments.child == "gaps":
        answer_gaps(arguments.model_path)
    else:
        report(arguments.rounds, arguments.parts, sys.stdout.write)


if __name__ == "__main__":
    main()
