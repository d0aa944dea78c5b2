"""TensorRT-LLM's stand-in samples the first token on the prefill worker, so that the chain runs in
both: a part of the golden matrix that is too slow for all of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from golden_cases import Case
from golden_matrix import Matrix, compare_all
from golden_modes import Disaggregated, Migrated, Request, aggregated, stand_in
from golden_workers import Bench

from worker.tiny_model import write_tiny_model

PROMPT = tuple(range(300, 340))
ASKED = {
    "frequency_penalty": {"penalty": 1.9},
    "min_tokens": {"n": 7},
    "trigger_phrase": {"text": " Wait, let me think.", "after_tokens": 2, "times": 3},
    "json_schema": {"schema": {"type": "array", "items": {"type": "array"}}},
}
CASES = [
    Case(name, arguments, sampling, PROMPT, 10)
    for name, arguments in ASKED.items()
    for sampling in ("greedy", "seeded")
]


class Pair(Disaggregated):
    """Both workers on the stand-in, which has no NIXL."""

    @asynccontextmanager
    async def running(self, bench: Bench, *more: str) -> AsyncIterator[None]:
        with stand_in():
            async with super().running(bench, *more):
                yield

    def _check(self) -> None:
        """The stand-in passes on what it computed, and says so with the request."""


@pytest.mark.timeout(300)
async def test_a_migrated_answer_goes_on_from_the_prefill_workers_first_token(tmp_path: Path) -> None:
    bench = Bench(write_tiny_model(tmp_path / "tiny"), tmp_path)
    pair = Pair("pair", "--engine", "trtllm", "--kv-lease-s", "0.1")
    matrix = Matrix("tiny", acting=set(ASKED))
    alone = aggregated()
    try:
        async with alone.running(bench):
            texts = [(case, await alone.tokens(Request(case, ()))) for case in CASES]
        for mode in (pair, Migrated("migrated pair", to=pair, at_every_token=True)):
            async with mode.running(bench):
                await compare_all(mode, texts, matrix)
    finally:
        await bench.close()
    matrix.check()
