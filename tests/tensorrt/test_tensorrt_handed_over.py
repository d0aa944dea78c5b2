"""Processors and controls whose first token a prefill worker of TensorRT-LLM samples: the answer is
that of one worker, or they are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_in import collect, stand_in
from test_tensorrt_disaggregated_params import in_role
from test_tensorrt_equality import CASES, CONTROLS, PROMPT, chain_of

from adapters.chain import ProcessorChain
from worker.engines import KeepKv, KvPart, LocalPrefill, ReadKv, TokenDelta
from worker.engines.trtllm import TrtllmEngine
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]  # several processes start, each loads torch

LENGTH = 24
SEEDED: dict[str, Any] = {"max_tokens": LENGTH, "seed": 11, "stop_token_ids": [1, 4]}
REFUSED = {"mirostat": "keeps a state that is made of logits", "force_last_phrase": "counts down to max_tokens"}

Chain = Callable[[int], ProcessorChain | None]
"""Makes the chain of an answer of so many tokens."""


async def handed_over(
    prefill: TrtllmEngine, decode: TrtllmEngine, asked: dict[str, Any], chain: Chain, name: str
) -> TokenDelta:
    """The answer of both workers. As the frontend does, it asks prefill for one token, and the
    worker makes the chain of an answer of any length there.
    """
    assert prefill._info is not None
    room = prefill._info.context_length - len(PROMPT)
    one = {**asked, "max_tokens": 1, "min_tokens": min(asked.get("min_tokens", 0), 1)}
    first = await collect(prefill, PROMPT, SamplingParams(**one), name, chain=chain(room), kv=KeepKv())
    if first.kv is None:
        return first
    kv = ReadKv(json.loads(json.dumps(first.kv)))
    return await collect(decode, PROMPT, SamplingParams(**asked), name, chain=chain(asked["max_tokens"]), kv=kv)


def comparable(answer: TokenDelta) -> Any:
    ranks = [[(entry.token_id, entry.rank) for entry in each] for each in answer.logprobs or ()]
    return answer.token_ids, answer.finish_reason, answer.stop_reason, ranks


async def test_the_answer_is_that_of_one_worker(model: Path) -> None:
    """Of each built-in and each control, or a refusal on prefill that names the processor."""
    wrong: dict[str, Any] = {}
    with stand_in():
        engines = [in_role(model, role) for role in ("aggregated", "prefill", "decode")]
        whole, prefill, decode = engines
        try:
            for each in engines:
                await each.start()
            for number, (name, args) in enumerate(CASES):

                def chain(length: int, name: str = name, args: dict[str, Any] = args) -> ProcessorChain:
                    return chain_of(model, name, args, PROMPT, length)

                if name in REFUSED:
                    with pytest.raises(InvalidRequest, match=f"{name}, which {REFUSED[name]}"):
                        await handed_over(prefill, decode, SEEDED, chain, name)
                    continue
                expected = await collect(whole, PROMPT, SamplingParams(**SEEDED), name, chain=chain(LENGTH))
                found = await handed_over(prefill, decode, SEEDED, chain, name)
                if comparable(found) != comparable(expected):
                    wrong[f"{name}-{number}"] = found, expected
            for number, controls in enumerate(CONTROLS):
                asked: dict[str, Any] = {"max_tokens": LENGTH, **controls}
                expected = await collect(whole, PROMPT, SamplingParams(**asked))
                found = await handed_over(prefill, decode, asked, lambda length: None, "control")
                if comparable(found) != comparable(expected):
                    wrong[f"control {number}"] = found, expected
            local: KvPart = LocalPrefill("missing")  # the decode worker sees all logits, and knows the length
            for name, args in [case for case in CASES if case[0] in REFUSED]:
                params = SamplingParams(**SEEDED)
                expected = await collect(whole, PROMPT, params, name, chain=chain_of(model, name, args, PROMPT, LENGTH))
                made = chain_of(model, name, args, PROMPT, LENGTH)
                found = await collect(decode, PROMPT, params, name, chain=made, kv=local)
                assert comparable(found) == comparable(expected)
        finally:
            for each in engines:
                await each.stop()
    assert not wrong
