"""Pauses, updates and sleeps that are cancelled wherever they wait: the engine then does what it
says that it does, with the weights that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from interruptions import END_S, interruptions, nothing_left
from weight_runs import ask, running, weights_of

from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.serving.weights import WeightControl
from worker.engines.weights import UpdatesWeights
from worker.tiny_model import write_tiny_model

PROMPT = list(range(20, 60))

Change = Callable[[UpdatesWeights, Path], Coroutine[Any, Any, object]]
CHANGES: dict[str, Change] = {
    "keep": lambda weights, path: weights.update_weights(path, None, "keep"),
    "finish": lambda weights, path: weights.update_weights(path, None, "finish"),
    "pause": lambda weights, path: weights.pause("finish"),
    "pause and keep": lambda weights, path: weights.pause("keep"),
    "pause and abort": lambda weights, path: weights.pause("abort"),
    "sleep": lambda weights, path: weights.sleep(1),
    "deep sleep": lambda weights, path: weights.sleep(2),
    "flush": lambda weights, path: weights.flush_cache(),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("weights")
    return [write_tiny_model(root / str(seed), arch="qwen3", seed=seed) for seed in range(2)]


@pytest.mark.parametrize("name", CHANGES)
async def test_a_cancelled_change_is_whole_or_none(sources: list[Path], name: str) -> None:
    async with running(sources[0]) as engine:
        weights = weights_of(engine)
        known: dict[str, list[int]] = {}
        for source in sources:
            version = (await weights.update_weights(source, None, "keep")).version
            known[version.digest] = (await ask(engine, "known", PROMPT, 4)).tokens
        assert len(known) == len({*map(tuple, known.values())}) == 2
        for number, interruption in enumerate(interruptions()):
            async with nothing_left(interruption), asyncio.timeout(END_S):
                under_way = asyncio.create_task(ask(engine, f"{number}", PROMPT, 6))
                await asyncio.sleep(0)
                await interruption.ended(CHANGES[name](weights, sources[number % 2]))
                if weights.weights_state == "asleep":
                    await weights.wake()
                if weights.weights_state == "needs_weights":  # those of an update are not in the checkpoint
                    await weights.update_weights(sources[number % 2], None, "keep")
                if weights.weights_state == "paused":
                    await weights.resume()
                assert weights.weights_state == "serving", interruption
                answer = await ask(engine, f"{number} after", PROMPT, 4)
                ((_, named),) = answer.weights
                assert named == weights.weight_version, interruption
                assert answer.tokens == known[named.digest], interruption
                assert len((await under_way).tokens) == 6 or name == "pause and abort", interruption


@pytest.mark.parametrize("function", ["free_cycles", "give_back_freed"])
async def test_a_change_that_fails_behind_its_work_is_made(
    sources: list[Path], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started, say, for what is done once the weights have changed."""

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    async with running(sources[0], kernels="torch", numerics="auto") as engine:
        weights = weights_of(engine)
        monkeypatch.setattr(host_memory, function, fail)
        with contextlib.suppress(RuntimeError):
            await weights.update_weights(sources[1], "new", "keep")
        with contextlib.suppress(RuntimeError):
            await weights.sleep(1)
        monkeypatch.undo()
        assert weights.weights_state == "asleep"
        await weights.wake()
        answer = await ask(engine, "after", PROMPT, 4)
        ((_, named),) = answer.weights
        assert (named, named.name) == (weights.weight_version, "new")


class Held:
    """Holds a function up where it is called, until it may go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._begun, self._may = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self._begun.set()
        assert self._may.wait(END_S)
        return self._function(*args)

    async def left_by(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """The task of work whose caller has left while it waited for the function."""
        task = asyncio.create_task(work)
        assert await asyncio.to_thread(self._begun.wait, END_S)
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
        return task

    async def go_on(self, task: asyncio.Task[object]) -> None:
        """Let it go on, and wait until the task has ended."""
        self._may.set()
        await asyncio.wait({task})


@pytest.mark.parametrize(("name", "state"), [("keep", "serving"), ("sleep", "asleep")])
async def test_a_change_under_way_decides_what_follows(
    sources: list[Path], name: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller leaves while the step thread makes it: what it does then fits what it says."""
    async with running(sources[0]) as engine:
        weights = cast(WeightControl, weights_of(engine))
        stepper = weights._stepper
        if name == "keep":  # an engine that waits for it
            await weights.update_weights(sources[1], None, "keep")
            await weights.sleep(2)
            await weights.wake()
            assert weights.weights_state == "needs_weights"
        held = Held(stepper.drop_kv)
        monkeypatch.setattr(stepper, "drop_kv", held)
        await held.go_on(await held.left_by(CHANGES[name](weights, sources[0])))
        assert (weights.weights_state, stepper.is_paused) == (state, state != "serving")


async def test_nothing_is_computed_beside_weights_that_load(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers sets global state while it loads, also for a caller that has left."""
    async with running(sources[0], kernels="torch", numerics="auto") as engine:
        weights = cast(WeightControl, weights_of(engine))
        version, before = weights.weight_version, await ask(engine, "before", PROMPT, 4)
        held = Held(weights._updates.network)
        monkeypatch.setattr(weights._updates, "network", held)
        task = await held.left_by(weights.update_weights(sources[1], None, "keep"))
        computes = not weights._stepper.is_paused
        await held.go_on(task)
        assert not computes
        assert task.cancelled()
        assert (weights.weights_state, weights.weight_version) == ("serving", version)
        assert (await ask(engine, "after", PROMPT, 4)).tokens == before.tokens
