"""What receipts put on the wire, on both engines: linear in the answer, attribution once,
nothing changes later.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from stand_in import embedded, running

from adapters.catalog import Catalog, Requested, Selection
from adapters.contract import Context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.sampling import SamplingParams

pytestmark = pytest.mark.asyncio

CATALOG = Catalog.default()
PROMPT = [9, 30, 41, 77]
CHOSEN = (
    Requested("frequency_penalty", {"penalty": 0.5}, path="processors[0]"),
    Requested("banned_tokens", {"token_ids": [5]}, path="processors[1]"),
    Requested("top_k", {"k": 40}, path="processors[2]"),
)


def asked(max_tokens: int, receipt: Any) -> EngineRequest:
    context = Context(Vocabulary(1024), seed=3, max_tokens=max_tokens)
    chain = CATALOG.build_chain(Selection(CHOSEN, receipt), context, step_budget_s=60)
    chain.wants_receipt = True
    chain.start(PROMPT)
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
    return EngineRequest(f"{receipt} {max_tokens}", PROMPT, params, chain)


async def receipts_of(engine: Any, max_tokens: int, receipt: Any) -> list[Any]:
    """The receipt of each chunk, as it is when the answer has ended; none has changed since it
    came.
    """
    told, known, finished = [], [], []
    async for delta in engine.generate(asked(max_tokens, receipt)):
        told.append(delta.engine_data["logits_processors"])
        known.append(copy.deepcopy(told[-1]))
        finished.append(delta.finish_reason)
    assert told == known
    assert finished[-1] == "length"
    return told


def num_bytes(receipt: Any) -> int:
    return len(json.dumps(receipt))


@pytest.mark.parametrize("engine", ["embedded", "trtllm"])
async def test_bytes_grow_with_the_answer_and_attribution_comes_once(engine: str, model: Path) -> None:
    async with embedded(model) if engine == "embedded" else running(model) as started:
        short, long = [await receipts_of(started, count, "debug") for count in (40, 160)]
        plain = await receipts_of(started, 40, True)
    # Each chunk has one snapshot of one size but for digits, the last one the attribution on top;
    # how many chunks there are depends on how fast they are taken.
    assert max(map(num_bytes, long[:-1])) <= max(map(num_bytes, short[:-1])) + 16
    assert num_bytes(long[-1]) <= 4.5 * num_bytes(short[-1])
    for receipts, count in ((short, 40), (long, 160)):
        assert all("tokens" not in receipt for receipt in receipts[:-1])
        attributed = receipts[-1]["tokens"]
        assert len(attributed) == sum(one["steps_active"] for one in receipts[-1]["processors"])
        assert {one["position"] for one in attributed} == set(range(len(PROMPT), len(PROMPT) + count))
    assert all("tokens" not in receipt for receipt in plain)
    assert plain[-1]["processors"] == short[-1]["processors"]
