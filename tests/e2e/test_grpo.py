"""GRPO over HTTP: log probabilities of trainer and rollouts are equal, and runs repeat exactly."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import REPOSITORY, Stack, Worker, running_stack, wait_for
from front_door_process import Door
from ports import free_port

from worker.models import model_cache, prepare_default_model

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


def answer_of(*reasons: str) -> dict[str, Any]:
    """A whole answer with choices that have ended for these reasons."""
    told = {"token_ids": [5], "train_logprobs": {"raw": [-1.0]}}
    choices = [{"index": index, "finish_reason": reason, **told} for index, reason in enumerate(reasons)]
    named = {"engine_data": {"weight_versions": [{"version": "1", "from_token": 0}]}}
    return {"data": [{"id": "model"}], "choices": choices, "nvext": {"choices": [named] * len(reasons)}}


def test_an_answer_that_was_aborted_is_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens so far have a reward that the whole answer would not have had."""
    answers = [answer_of(), answer_of("stop", "length"), answer_of("length", "abort")]
    monkeypatch.setattr(workers, "_asked", lambda *asked: answers.pop(0))
    sampler = workers.Workers("http://door", ["http://engine"], KEY)
    ask = {"n": 2, "max_tokens": 1, "seed": 1}
    assert len(sampler.sample([[9]], **ask)[0]) == 2
    with pytest.raises(workers.WorkerError, match="choice 1 is not whole: abort"):
        sampler.sample([[9]], **ask)


@contextmanager
def served(directory: Path, model: Path) -> Iterator[Stack]:
    """A frontend that migrates, and a key for trainers."""
    with running_stack(directory, model) as stack:
        (directory / "keys").write_text(f"{KEY}\n")
        (directory / "keys").chmod(0o600)
        stack.start_frontend("--migration-limit", "3")
        yield stack


@pytest.fixture
def stack(tmp_path: Path, tiny_model: Path) -> Iterator[Stack]:
    with served(tmp_path / "stack", tiny_model) as stack:
        yield stack


def start(stack: Stack, *arguments: str) -> tuple[Worker, str]:
    """Start a worker; returns it, and where it takes weights."""
    port = free_port()
    engine = ("--engine-port", str(port), "--engine-key-file", str(stack.directory / "keys"))
    return stack.start_worker(*EXACT, *engine, *arguments), f"http://127.0.0.1:{port}"


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


def test_weights_are_found_from_where_the_trainer_is(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is the trainer's own; the workers have another working directory."""
    _, url = start(stack)
    sampler = workers.Workers(Door(stack).url, [url], KEY)
    (tmp_path / "newest").symlink_to(stack.model_path)
    monkeypatch.chdir(tmp_path)
    sampler.update(Path("newest"), "1")
    (group,) = sampler.sample([[9, 30, 41]], n=1, max_tokens=2, seed=1)
    assert group[0].versions == ("1",)


def test_rollouts_are_of_the_model_itself(tmp_path: Path, tiny_model: Path) -> None:
    """Not of what is left by the controls that its checkpoint recommends."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.5, "repetition_penalty": 1.3}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    with served(tmp_path / "stack", model) as stack:
        _, url = start(stack)
        sampler = workers.Workers(Door(stack).url, [url], KEY)
        (group,) = sampler.sample([[9, 30, 41]], n=8, max_tokens=6, seed=1)
    assert len({tuple(one.rollout.token_ids) for one in group}) > 4


class Killing:
    """A sampler during whose second step a worker dies in the middle of answers."""

    def __init__(self, sampler: Any, victim: Worker) -> None:
        self._sampler, self._victim = sampler, victim
        self._num_steps = 0

    def update(self, weights: Path, version: str) -> None:
        self._sampler.update(weights, version)

    def _sent(self) -> float:
        """Tokens that the victim has sent behind the first of each answer."""
        return self._victim.metric("dlw_inter_token_latency_seconds_count")

    def sample(self, prompts: Any, **settings: Any) -> Any:
        self._num_steps += 1
        if self._num_steps != 2:
            return self._sampler.sample(prompts, **settings)
        before = self._sent()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._sampler.sample, prompts, **settings)
            wait_for(lambda: asked.done() or self._sent() > before, "tokens of answers under way")
            assert not asked.done(), "the answers ended before the worker died"
            self._victim.signal(signal.SIGKILL)
            return asked.result()


def check_a_worker_may_die(model: Path, directory: Path, **settings: Any) -> None:
    """Two runs of three steps are equal, in one of which a worker dies in the middle of answers."""
    runs, num_continued = [], 0.0
    for name in ("whole", "killed"):
        with served(directory / name, model) as stack:
            migration = ("--migration", "on", "--boundary-store", f"file:{stack.directory / 'boundaries'}")
            (victim, one), (other, two) = (start(stack, *migration) for _ in range(2))
            sampler = workers.Workers(Door(stack).url, [one, two], KEY)
            if name == "killed":
                sampler = Killing(sampler, victim)
            runs.append(run(stack, sampler, name, steps=3, **settings))
            if name == "killed":
                num_continued = other.metric("dlw_continued_requests_total")
    assert num_continued > 0
    assert [step.largest_difference for step in runs[0]] == [0.0, 0.0, 0.0]
    assert runs[0] == runs[1]
    assert len({step.weights for step in runs[0]}) == 3


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_run_in_which_a_worker_dies_is_equal(tmp_path: Path, tiny_model: Path) -> None:
    check_a_worker_may_die(tiny_model, tmp_path, max_tokens=600, answers=6)


@pytest.mark.campaign
@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_so_is_one_of_the_default_model(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct on the example's own task, of which the last two layers learn."""
    model = prepare_default_model(model_cache(os.environ), lambda line: None)
    settings = {"task": "sums", "max_tokens": 32, "answers": 4, "layers": 2, "learning_rate": 3e-5}
    check_a_worker_may_die(model, tmp_path, **settings)
