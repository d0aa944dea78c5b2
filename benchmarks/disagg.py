"""What disaggregation costs: KV transfer against a copy through shared memory, and what the hand-off adds to a request.

    .venv/bin/python benchmarks/disagg.py

Two processes on this machine. *Transfer*: whole segments of a store of 24 tensors are read with NIXL, and the same
bytes are copied once out of shared memory by one thread, in turn; the target is at least 0.6 of the copy's speed.
*Hand-off*: two engines, prompts of several lengths; the time from the hand-off to the first token at the decode engine,
without the transfer and one decode step, which that token needs anywhere; the target is 5 ms at most.

Prints a table of medians; `results/disagg.md` keeps the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
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
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.engines import KeepKv, ReadKv
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.kv_layout import KvLayout
from worker.engines.embedded.transfer import KvHandle, KvPort
from worker.sampling import SamplingParams

LAYOUT = KvLayout("benchmark", "bfloat16", layers=12, kv_heads=4, head_dim=64, block_size=16, segment_size=256)
NUM_SEGMENTS = 32
TRANSFER_TARGET = 0.6
HAND_OFF_TARGET_MS = 5.0


class Child:
    """The other process: says and hears one line of JSON at a time."""

    def __init__(self, *arguments: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=environ,
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
    shape = (NUM_SEGMENTS, LAYOUT.kv_heads, LAYOUT.segment_size, LAYOUT.head_dim)
    return [torch.full(shape, fill, dtype=torch.bfloat16) for _ in range(2 * LAYOUT.layers)]


def hold_for_transfer() -> None:
    """The child of the transfer: holds prompts of as many segments as asked for, until it is told to leave."""
    import select

    tensors = store(1.0)
    port = KvPort(tensors, LAYOUT)
    held: KvHandle | None = None
    while True:
        port.notes()
        if not select.select([sys.stdin], [], [], 0.0005)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        if held is not None:
            port.withdraw(held)
        held = port.publish(range(int(json.loads(line))))
        assert held is not None
        say(asdict(replace(held, metadata=b"")) | {"metadata": b64encode(held.metadata).decode()})


def measure_transfer(rounds: int) -> list[tuple[str, float, float]]:
    """Size, speed of NIXL and of the copy in bytes per second, by size."""
    child = Child("--child", "transfer")
    port = KvPort(store(0.0), LAYOUT)
    rows = []
    for count in (1, 4, 16):
        speeds: tuple[list[float], list[float]] = ([], [])
        for round_number in range(rounds + 1):
            data = child.ask(count)
            layout = KvLayout(**data.pop("layout"))
            handle = KvHandle(layout=layout, **(data | {"metadata": b64decode(data["metadata"])}))
            began = time.perf_counter()
            read = port.read(handle, range(count), 0, count * LAYOUT.segment_size)
            while (state := read.poll(1.0)) == "busy":
                pass
            took = time.perf_counter() - began
            read.release()
            if state != "done":
                raise RuntimeError(f"the transfer is {state}")
            copied = copy_once(port.tensors, count, read.num_bytes)
            if round_number:  # the first one connects
                speeds[0].append(read.num_bytes / took)
                speeds[1].append(read.num_bytes / copied)
        rows.append((f"{read.num_bytes / 2**20:.0f} MiB", *map(statistics.median, speeds)))
    child.end()
    return rows


def copy_once(tensors: list[torch.Tensor], count: int, num_bytes: int) -> float:
    """Seconds of one thread's copy of `num_bytes` out of shared memory into the first segments of `tensors`."""
    block = shared_memory.SharedMemory(create=True, size=num_bytes)
    try:
        source = torch.frombuffer(block.buf, dtype=torch.bfloat16).fill_(2)
        parts = source.split(source.numel() // len(tensors))
        began = time.perf_counter()
        for tensor, part in zip(tensors, parts, strict=True):
            tensor[:count].view(-1).copy_(part)
        return time.perf_counter() - began
    finally:
        del source, parts
        block.close()
        block.unlink()


def write_checkpoint(path: Path) -> None:
    """A Llama of 12 layers with random weights, about 100 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def engine(path: str, role: str) -> EmbeddedEngine:
    return EmbeddedEngine(EmbeddedConfig(model_path=path, device="cpu", role=role, max_num_seqs=8))


async def prefill(path: str) -> None:
    """The child of the hand-off: computes prompts and says where their KV is."""
    worker = engine(path, "prefill")
    await worker.start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        prompt = json.loads(line)
        began = time.perf_counter()
        async for delta in worker.generate(str(began), prompt, SamplingParams(max_tokens=1), KeepKv()):
            if delta.kv is not None:
                say({"kv": delta.kv, "seconds": time.perf_counter() - began})
    await worker.stop()


async def measure_hand_off(path: str, rounds: int) -> list[tuple[int, float, float, float, float]]:
    """Prompt length, and in seconds: prefill, transfer, one decode step, and what else comes before the first token."""
    child = await asyncio.to_thread(Child, "--child", "prefill", "--model-path", path)
    worker = engine(path, "decode")
    await worker.start()
    rows = []
    numbers = random.Random(0)
    for length in (128, 512, 2048):
        found: list[tuple[float, float, float, float]] = []
        for round_number in range(rounds + 1):
            prompt = numbers.choices(range(8192), k=length)
            said = await asyncio.to_thread(child.ask, prompt)
            before = worker.transfers()["seconds"]
            times = [time.perf_counter()]
            params = SamplingParams(max_tokens=16, ignore_eos=True)
            async for delta in worker.generate(f"{length} {round_number}", prompt, params, ReadKv(said["kv"])):
                times += [time.perf_counter()] * len(delta.token_ids)
            transfer = worker.transfers()["seconds"] - before
            step = statistics.median(later - sooner for sooner, later in pairwise(times[1:]))
            if round_number:
                found.append((said["seconds"], transfer, step, times[1] - times[0] - transfer - step))
        rows.append((length, *(statistics.median(column) for column in zip(*found, strict=True))))
    await worker.stop()
    child.end()
    return rows


def verdict(good: bool) -> str:
    return "yes" if good else "no"


def report(rounds: int, write: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory))
        hand_off = asyncio.run(measure_hand_off(directory, rounds))
    transfer = measure_transfer(rounds)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    write(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}, ")
    write(f"{torch.get_num_threads()} threads; load averages at the end {load}; medians of {rounds} rounds.\n\n")
    write("| KV | NIXL, GB/s | one copy, GB/s | ratio | at least 0.6 |\n| ---: | ---: | ---: | ---: | --- |\n")
    for size, ours, copied in transfer:
        ratio = ours / copied
        write(
            f"| {size} | {ours / 1e9:.2f} | {copied / 1e9:.2f} | {ratio:.2f} | {verdict(ratio >= TRANSFER_TARGET)} |\n"
        )
    write("\n| prompt | prefill, ms | transfer, ms | decode step, ms | the rest, ms | at most 5 |\n")
    write("| ---: | ---: | ---: | ---: | ---: | --- |\n")
    for length, *seconds in hand_off:
        shown = " | ".join(f"{1e3 * value:.1f}" for value in seconds)
        write(f"| {length} | {shown} | {verdict(1e3 * seconds[-1] <= HAND_OFF_TARGET_MS)} |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure KV transfer and the hand-off.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--child", choices=("transfer", "prefill"), help=argparse.SUPPRESS)
    parser.add_argument("--model-path", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "transfer":
        hold_for_transfer()
    elif arguments.child == "prefill":
        asyncio.run(prefill(arguments.model_path))
    else:
        report(arguments.rounds, sys.stdout.write)


if __name__ == "__main__":
    main()
