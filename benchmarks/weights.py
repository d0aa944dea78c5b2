"""Updates of the weights while a worker's engine decodes: seconds, throughput, memory.

``python benchmarks/weights.py [--model DIR [--update DIR]] [--updates 20]``, in one process: an
engine decodes answers one behind the other, first without updates, then while its weights are
replaced by those of the same checkpoint, or of the one that is named; rates are those between two
updates. Seconds and processor time of an update are those beyond reading the checkpoint; a busy
machine disturbs the latter less. With ``--updates 0`` there are only those of an idle engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from checkpoint import write_checkpoint

from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.model.stored_weights import read_weights
from worker.engines.weights import UpdatesWeights
from worker.sampling import SamplingParams

CLIENTS, ANSWER = 8, 128
IDLE_UPDATES = 9


class Load:
    """Clients that ask for one answer behind the other, and a count of their tokens."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.num_tokens = self.num_mixed = 0
        self._engine = engine
        self._is_over = False

    async def run(self) -> None:
        """Ask until `stop`."""
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    def stop(self) -> None:
        """Ask no more."""
        self._is_over = True

    async def _client(self, number: int) -> None:
        asked = 0
        while not self._is_over:
            asked += 1
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=1.0, seed=asked)
            versions: list[int] = []
            async for delta in self._engine.generate(EngineRequest(f"{number}-{asked}", [number + 5] * 32, params)):
                self.num_tokens += len(delta.token_ids)
                versions += [first for first, _ in delta.weights]
            self.num_mixed += len(versions) > 1

    async def rate(self, seconds: float) -> float:
        """Tokens of the next `seconds`, for each second of processor time of this process, which a
        busy machine disturbs less.
        """
        before, began = self.num_tokens, time.process_time()
        await asyncio.sleep(seconds)
        return (self.num_tokens - before) / max(time.process_time() - began, 1e-9)


def resident_mb() -> int:
    """Memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE // 10**6


async def measure(model: Path, update: Path, updates: int, phase_s: float) -> dict[str, object]:
    """Figures of one engine that serves `model`, whose weights become those of `update`."""
    config = EmbeddedConfig(model_path=model, device="cpu", context_length=1024, weight_updates=True)
    engine = EmbeddedEngine(config)
    info = await engine.start()
    assert engine.weights is not None
    found: dict[str, object] = {"computed_by": info.computed_by}
    if updates:
        found |= await under_load(engine, update, updates, phase_s)
    found |= await idle(engine.weights, update)
    await engine.stop()
    return {**found, "load_average": os.getloadavg()[0]}


async def under_load(engine: EmbeddedEngine, update: Path, updates: int, phase_s: float) -> dict[str, object]:
    """Throughput before the first update and between updates, and their seconds."""
    weights, load = engine.weights, Load(engine)
    assert weights is not None
    running = asyncio.create_task(load.run())
    await load.rate(phase_s)
    between, seconds, memory = [], [], []
    alone = [await load.rate(phase_s) for _ in range(updates)]
    for _ in range(updates):
        updated = await weights.update_weights(update, None, "finish")
        seconds.append(updated.seconds)
        await asyncio.sleep(0.2)
        between.append(await load.rate(phase_s))
        memory.append(resident_mb())
    load.stop()
    await running
    return {
        "tokens_per_cpu_s_before": round(statistics.median(alone), 1),
        "tokens_per_cpu_s_after": round(statistics.median(between), 1),
        "update_under_load_s": round(statistics.median(seconds), 3),
        "answers_of_two_versions": load.num_mixed,
        "resident_mb": [memory[0], memory[len(memory) // 2], memory[-1]],
    }


async def idle(weights: UpdatesWeights, update: Path) -> dict[str, object]:
    """Updates while nothing is decoded."""
    formats: Mapping[str, int] = {}
    quiet, spent = [], []
    for _ in range(IDLE_UPDATES):
        began = time.process_time()
        read_weights(update)
        read = time.process_time()
        updated = await weights.update_weights(update, None, "keep")
        formats = updated.formats
        quiet.append(updated.seconds)
        spent.append(time.process_time() - read - (read - began))
    return {
        "formats": dict(formats),
        "update_idle_s": [round(each, 3) for each in sorted(quiet)],
        "update_idle_cpu_s": [round(each, 3) for each in sorted(spent)],
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint; by default one of 125 million random parameters")
    parser.add_argument("--update", type=Path, help="checkpoint whose weights are given; by default the model's own")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--phase-s", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or Path(directory)
        if arguments.model is None:
            write_checkpoint(model)
        print(
            json.dumps(
                asyncio.run(measure(model, arguments.update or model, arguments.updates, arguments.phase_s)), indent=1
            )
        )


if __name__ == "__main__":
    main()
