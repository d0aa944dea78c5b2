"""More requests at once than a stock server keeps reports of: each has its receipt or failure."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from engine import close_shared, tiny

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.masks import BannedTokens
from adapters.vllm.reports import MAX_RECEIPTS
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, TokenDelta
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.sampling import SamplingParams

COUNT = MAX_RECEIPTS + 200
OPTIONS = {"max_model_len": 64, "max_num_seqs": COUNT, "enforce_eager": True, "dtype": "float32", "block_size": 32}
NUM_TOKENS = 6


async def last_delta(engine: VllmEngine, name: str, banned: list[int], forced: list[int]) -> TokenDelta:
    assert engine._info is not None
    context = Context(Vocabulary(engine._info.vocab_size))
    built = [
        *BannedTokens.build(BannedTokens.Args(token_ids=banned), context),
        *ForcedPrefix.build(ForcedPrefix.Args(token_ids=forced), context),
    ]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    found = TokenDelta()
    async for delta in engine.generate(EngineRequest(name, [5, 6, 7], params, ProcessorChain(built, context))):
        found = delta
    return found


@pytest.mark.campaign
async def test_each_of_many_has_its_receipt_or_failure(tmp_path: Path) -> None:
    close_shared()
    engine = VllmEngine(VllmConfig(model_path=str(tiny(tmp_path, "llama")), options=OPTIONS))
    try:
        await engine.start()
        kept = await asyncio.gather(*(last_delta(engine, f"kept-{n}", [9], [40, 41]) for n in range(COUNT)))
        for delta in kept:
            assert delta.receipt is not None
            assert [record.steps_active for record in delta.receipt.records] == [NUM_TOKENS, 2]
        failed = await asyncio.gather(*(last_delta(engine, f"failed-{n}", [9], [40, 9]) for n in range(COUNT)))
        assert all(delta.failure is not None and delta.finish_reason == "error" for delta in failed)
    finally:
        await engine.stop()
        gc.collect()  # vLLM leaves sockets to it, which tells of them here
