from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_doubles import ScriptedModel, StartEngine, config

from worker.engines.embedded import EmbeddedEngine
from worker.tiny_model import ARCHITECTURES, write_tiny_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {arch: write_tiny_model(root / arch, arch=arch) for arch in ARCHITECTURES}


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
