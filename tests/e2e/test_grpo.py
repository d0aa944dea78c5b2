"""GRPO over HTTP: log probabilities of trainer and rollouts are equal, and runs repeat exactly."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import REPOSITORY, Stack, Worker, running_stack, wait_for
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
        stack.start_frontend("--migration-limit", "3")
        yield stack


def start(stack: Stack, *arguments: str) -> tuple[Worker, str]:
    """A worker, and where it takes weights."""
    port = free_port()
    given = ("--engine-port", str(port), "--engine-key-file", str(stack.directory / "keys"), *arguments)
    return stack.start_worker(*EXACT, *given), f"http://127.0.0.1:{port}"


def run(stack: Stack, sampler: Any, name: str, **settings: Any) -> list[Any]:
    """The steps of one run."""
    given = {"task": "letters", "prompts": 2, "answers": 4, "max_tokens": 6, "learning_rate": 0.003, **settings}
    return list(grpo.train(stack.model_path, sampler, grpo.Settings(**given), stack.directory / name))


def test_differences_are_zero_and_runs_are_equal(stack: Stack) -> None:
    _, url = start(stack)
    door = Door(stack)
    sampler = workers.Workers(door.url, [url], KEY)
    first, again = (run(stack, sampler, name, steps=2) for name in ("first", "again"))
    assert [step.largest_difference for step in first] == [0.0, 0.0]
    assert first == again
    assert first[0].weights != first[1].weights
    with pytest.raises(RuntimeError, match="401"):
        workers.Workers(door.url, [url], "another-key").update(stack.directory, "1")


@pytest.mark.campaign
@pytest.mark.timeout(400)  # three runs of long answers
def test_a_run_is_equal_when_a_worker_dies(stack: Stack) -> None:
    """In the middle of the second step's answers, which go on in the other worker."""
    store = ("--migration", "on", "--boundary-store", f"file:{stack.directory / 'boundaries'}")
    (first, first_url), (second, second_url) = start(stack, *store), start(stack, *store)
    door = Door(stack)
    settings = {"steps": 3, "max_tokens": 300}
    expected = run(stack, workers.Workers(door.url, [first_url, second_url], KEY), "quiet", **settings)
    records = stack.directory / "boundaries"
    killer = Killer(workers.Workers(door.url, [first_url, second_url], KEY), first, records)
    found = run(stack, killer, "killed", **settings)
    assert not first.running
    assert second.metric("dlw_continued_requests_total") > 0
    assert found == expected
    assert [step.largest_difference for step in found] == [0.0] * 3


class Killer:
    """`Workers` of which one is killed, by its pid, while it makes the second step's rollouts."""

    def __init__(self, inner: Any, victim: Worker, records: Path) -> None:
        self._inner, self._victim, self._records = inner, victim, records

    def update(self, weights: Path, version: str) -> None:
        self._inner.update(weights, version)
        self._version = version

    def sample(self, *given: Any, **named: Any) -> Any:
        if self._version != "1":
            return self._inner.sample(*given, **named)
        killer = threading.Thread(target=self._kill)
        killer.start()
        try:
            return self._inner.sample(*given, **named)
        finally:
            killer.join()

    def _kill(self) -> None:
        wait_for(lambda: sum(path.is_file() for path in self._records.rglob("*")) >= 8, "tokens of all answers")
        self._victim.end()
