"""Ids of a row of logits that the tokenizer does not have: vLLM samples none of them here."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from engine import close_shared, tiny

from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.sampling import SamplingParams

OPTIONS = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "dtype": "float32", "block_size": 32}
PROMPT = list(range(20, 60))


@pytest.mark.campaign
async def test_no_request_is_given_padding_of_the_row(tmp_path: Path) -> None:
    """Neither one that vLLM samples by itself nor one whose processor makes those ids likely."""
    close_shared()
    model = tiny(tmp_path, "llama")
    engine = VllmEngine(VllmConfig(model_path=str(model), options=OPTIONS))
    try:
        info = await engine.start()
        num_tokens = Vocabulary.from_pretrained(str(model), info.vocab_size).num_tokens
        assert num_tokens < info.vocab_size
        likely = [0.0] * num_tokens + [50.0] * (info.vocab_size - num_tokens)
        asked: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {"temperature": 2.0, "seed": 3}]
        for number, fields in enumerate(asked):
            for bias in (None, likely):
                params = SamplingParams(max_tokens=200, ignore_eos=True, embedding_bias=bias, **fields)
                found: list[int] = []
                async for delta in engine.generate(EngineRequest(f"{number}-{bias is None}", PROMPT, params)):
                    found += delta.token_ids
                assert len(found) == 200
                assert max(found) < num_tokens
    finally:
        await engine.stop()
        gc.collect()  # vLLM leaves sockets to it, which tells of them here
