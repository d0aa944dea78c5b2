"""GRPO over HTTP: log probabilities of trainer and rollouts are equal, and runs repeat exactly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import REPOSITORY, Stack, running_stack
from front_door_process import Door
from ports import free_port

EXACT = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact")
KEY = "the-key-of-a-trainer"

sys.path.append(str(REPOSITORY / "examples" / "grpo"))
grpo: Any = importlib.import_module("grpo")
workers: Any = importlib.import_module("workers")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = grpo.torch.get_num_threads()
    grpo.torch.set_num_threads(1)
    yield
    grpo.torch.set_num_threads(before)


@pytest.fixture
def stack(tmp_path: Path, tiny_model: Path) -> Iterator[Stack]:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    with running_stack(tmp_path, tiny_model) as stack:
        stack.start_frontend()
        yield stack


def start(stack: Stack) -> str:
    """Start a worker; returns where it takes weights."""
    port = free_port()
    stack.start_worker(*EXACT, "--engine-port", str(port), "--engine-key-file", str(stack.directory / "keys"))
    return f"http://127.0.0.1:{port}"


def run(stack: Stack, sampler: Any, name: str, **settings: Any) -> list[Any]:
    """The steps of one run."""
    given = {"task": "letters", "prompts": 2, "answers": 4, "max_tokens": 6, "learning_rate": 0.003, **settings}
    return list(grpo.train(stack.model_path, sampler, grpo.Settings(**given), stack.directory / name))


def test_differences_are_zero_and_runs_are_equal(stack: Stack) -> None:
    url = start(stack)
    door = Door(stack)
    sampler = workers.Workers(door.url, [url], KEY)
    first, again = (run(stack, sampler, name, steps=2) for name in ("first", "again"))
    assert [step.largest_difference for step in first] == [0.0, 0.0]
    assert first == again
    assert first[0].weights != first[1].weights
    with pytest.raises(RuntimeError, match="401"):
        workers.Workers(door.url, [url], "another-key").update(stack.directory, "1")
