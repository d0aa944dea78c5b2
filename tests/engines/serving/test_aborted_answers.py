"""An answer that pauses abort and a trainer resumes is the one without pauses, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from weight_runs import running, weights_of

from worker.engines import EngineRequest, TokenDelta
from worker.engines.embedded import EmbeddedEngine
from worker.sampling import SamplingParams

PROMPT = [*range(20, 60), *range(20, 40)]
COUNT = 120

CONTROLS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**53), "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7])},
    optional={
        "top_p": st.sampled_from([0.3, 0.95]),
        "top_k": st.sampled_from([2, 40]),
        "min_p": st.sampled_from([0.01, 0.2]),
    },
)


async def part_of(engine: EmbeddedEngine, name: str, so_far: list[int], controls: Any, found: list[TokenDelta]) -> None:
    """An answer to the prompt with the tokens so far behind it; `found` grows meanwhile."""
    params = SamplingParams(max_tokens=COUNT - len(so_far), ignore_eos=True, logprobs=0, **controls)
    async for delta in engine.generate(EngineRequest(name, [*PROMPT, *so_far], params)):
        found.append(delta)


def tokens_of(found: list[TokenDelta]) -> list[tuple[int, float]]:
    """Ids and log probabilities."""
    ids = [token_id for delta in found for token_id in delta.token_ids]
    logprobs = [position[0].logprob for delta in found for position in delta.logprobs or []]
    return list(zip(ids, logprobs, strict=True))


async def resumed(engine: EmbeddedEngine, controls: Any, pauses: list[int]) -> list[tuple[int, float]]:
    """Tokens of an answer that is aborted behind so many more tokens each time."""
    whole: list[tuple[int, float]] = []
    for number, count in enumerate([*pauses, COUNT]):
        found: list[TokenDelta] = []
        so_far = [token_id for token_id, _ in whole]
        task = asyncio.create_task(part_of(engine, f"part-{number}", so_far, controls, found))
        while len(tokens_of(found)) < count and not task.done():
            await asyncio.sleep(0)
        await weights_of(engine).pause("abort")
        await task
        await weights_of(engine).resume()
        whole += tokens_of(found)
        if found[-1].finish_reason == "length":
            return whole
        assert found[-1].finish_reason == "abort"
    raise AssertionError("the last part was not aborted before its end")


@settings(max_examples=6, deadline=None)
@given(controls=CONTROLS, pauses=st.lists(st.integers(0, 30), min_size=1, max_size=5), strangers=st.integers(0, 2))
def test_parts_are_the_whole(checkpoints: dict[str, Path], controls: Any, pauses: list[int], strangers: int) -> None:
    """Whatever its controls, whenever it is aborted, and whatever else is in its batches."""

    async def play() -> None:
        async with running(checkpoints["llama"]) as engine:
            expected: list[TokenDelta] = []
            await part_of(engine, "whole", [], controls, expected)
            others = [
                asyncio.create_task(part_of(engine, f"other-{number}", [], {"seed": number, "temperature": 1.0}, []))
                for number in range(strangers)
            ]
            assert await resumed(engine, controls, pauses) == tokens_of(expected)
            await asyncio.gather(*others)
            assert engine.num_unfinished() == 0

    asyncio.run(play())
