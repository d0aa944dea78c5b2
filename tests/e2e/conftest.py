from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_stack import DYNAMO, STAND_IN, Stack, Worker, running_stack
from processor_requests import PATIENT

from worker.tiny_model import write_tiny_model

collect_ignore = [] if DYNAMO >= (1, 6) else ["test_openengine_sidecar.py"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture
def stack(tmp_path: Path, tiny_model: Path) -> Iterator[Stack]:
    """An empty stack of this test's own: it starts what it needs, everything is killed
    afterwards.
    """
    with running_stack(tmp_path, tiny_model) as empty:
        yield empty


@pytest.fixture(scope="session")
def trtllm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """One frontend and one worker on the stand-in for TensorRT-LLM, for tests that leave them as
    they were.
    """
    with running_stack(tmp_path_factory.mktemp("trtllm"), tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--engine", "trtllm", *PATIENT, **STAND_IN)
        yield stack


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Worker]]:
    """One frontend and one worker with the real engine, for tests that leave them as they were."""
    with running_stack(tmp_path_factory.mktemp("stack"), tiny_model) as stack:
        stack.start_frontend()
        yield stack, stack.start_worker("--device", "cpu", "--dtype", "float32")
