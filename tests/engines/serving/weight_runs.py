"""Engines whose weights change, and what an answer of theirs must be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file

from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.weights import UpdatesWeights, WeightVersion
from worker.models.weight_files import SINGLE
from worker.sampling import SamplingParams

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Answer:
    """Tokens of one answer, and the versions that its engine says they come from."""

    tokens: list[int] = field(default_factory=list)
    weights: list[tuple[int, WeightVersion]] = field(default_factory=list)
    finish_reason: str | None = None

    def runs(self) -> list[tuple[str, int, int]]:
        """Name of each version, and the first of its tokens and the one past the last."""
        ends = [*[first for first, _ in self.weights], len(self.tokens)][1:]  # none, of one that was aborted before
        return [(version.name, first, end) for (first, version), end in zip(self.weights, ends, strict=True)]


def config(path: Path, **changes: object) -> EmbeddedConfig:
    """Settings of an engine whose bits do not depend on what else it computes."""
    settings: dict[str, object] = {"device": "cpu", "packed_copy": "off", "numerics": "exact", "weight_updates": True}
    settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "context_length": 512}
    return EmbeddedConfig(model_path=path, **(settings | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def running(path: Path, **changes: object) -> AsyncIterator[EmbeddedEngine]:
    """An engine that has started, until the end."""
    engine = EmbeddedEngine(config(path, **changes))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def weights_of(engine: EmbeddedEngine) -> UpdatesWeights:
    """What changes the engine's weights."""
    assert engine.weights is not None
    return engine.weights


async def ask(
    engine: EmbeddedEngine,
    name: str,
    prompt: Sequence[int],
    count: int,
    seed: int = 0,
    answer: Answer | None = None,
    so_far: Sequence[int] = (),
) -> Answer:
    """A sampled answer of `count` tokens, behind those `so_far`; `answer` grows meanwhile."""
    answer = answer or Answer()
    params = SamplingParams(max_tokens=count + len(so_far), temperature=1.0, seed=seed, ignore_eos=True)
    async for delta in engine.generate(EngineRequest(name, prompt, params, generated_token_ids=list(so_far))):
        answer.tokens += delta.token_ids
        answer.weights += delta.weights
        answer.finish_reason = delta.finish_reason
    return answer


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint of one file."""
    return load_file(path / SINGLE)


def as_bytes(tensors: Tensors) -> memoryview:
    """Tensors as a trainer sends them."""
    return memoryview(bytearray(save(dict(tensors))))


def copy_with(base: Path, directory: Path, tensors: Tensors) -> Path:
    """A checkpoint like `base`, of other weights."""
    directory.mkdir()
    for file in base.iterdir():
        if file.is_file() and file.name != SINGLE:
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(dict(tensors), directory / SINGLE, metadata={"format": "pt"})
    return directory
