from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_doubles import ScriptedModel, StartEngine, config
from random_checkpoints import TYPES, write

from worker.engines.embedded import EmbeddedEngine
from worker.tiny_model import ARCHITECTURES, write_tiny_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each architecture, with a tokenizer."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {arch: write_tiny_model(root / arch, arch=arch) for arch in ARCHITECTURES}


@pytest.fixture(scope="session")
def every_checkpoint(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each model type of `random_checkpoints.EVERY_TYPE`."""
    root = tmp_path_factory.mktemp("more_checkpoints")
    for model_type, settings in TYPES.items():
        write(root / model_type, model_type, settings)
    return checkpoints | {model_type: root / model_type for model_type in TYPES}


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For what is too small for two, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts engines on scripted models, and stops them at the end."""
    started: list[EmbeddedEngine] = []

    async def start(model: ScriptedModel, **changes: object) -> EmbeddedEngine:
        engine = EmbeddedEngine(config(**changes), model)
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.stop()
