from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from stand_in import embedded, running

from worker.engines.embedded import EmbeddedEngine
from worker.engines.trtllm import TrtllmEngine
from worker.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tensorrt") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model: Path) -> AsyncIterator[TrtllmEngine]:
    """The engine on the stand-in of the newest version."""
    async with running(model, "--max-num-batched-tokens", "64") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(model: Path) -> AsyncIterator[EmbeddedEngine]:
    async with embedded(model) as started:
        yield started
