"""Pauses, updates and sleeps that are cancelled wherever they wait: the engine then does what it
says that it does, with the weights that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from interruptions import END_S, interruptions, nothing_left
from weight_runs import ask, running, weights_of

from worker.engines.embedded.host import memory as host_memory
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
