"""A migrated request in disaggregated serving: its prompt and answer so far come as KV, and its
chain goes on, on the logits of the answer if its state is made of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors import BUILTINS
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, KeepKv, ReadKv, TokenDelta
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.sampling import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, 500] * 4
LENGTH = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(checkpoints: dict[str, Path]) -> AsyncIterator[tuple[EmbeddedEngine, EmbeddedEngine]]:
    """A prefill and a decode engine."""
    started = []
    for role in ("prefill", "decode"):
        config = EmbeddedConfig(
            model_path=next(iter(checkpoints.values())), device="cpu", dtype="float32", numerics="exact", role=role
        )
        started.append(EmbeddedEngine(config))
        await started[-1].start()
    yield started[0], started[1]
    for engine in reversed(started):
        await engine.stop()


def asked(name: str | None) -> tuple[SamplingParams, ProcessorChain]:
    kinds = [kind for kind in BUILTINS if kind.name == name]
    context = Context(Vocabulary(1024), frozenset(), 7)
    members = [member for kind in kinds for member in kind.build(kind.Args(), context)]
    chain = ProcessorChain(members, context)
    chain.wants_receipt = True
    chain.start(PROMPT)
    controls: dict[str, Any] = {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.5}
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **controls), chain


async def whole(engine: EmbeddedEngine, *arguments: Any, **named: Any) -> TokenDelta:
    found = TokenDelta()
    async for delta in engine.generate(EngineRequest(*arguments, **named)):
        delta.token_ids = found.token_ids + delta.token_ids
        found = delta
    return found


@pytest.mark.parametrize("name", [None, "mirostat"])
async def test_it_goes_on_as_it_would_have(pair: tuple[EmbeddedEngine, EmbeddedEngine], name: str | None) -> None:
    prefill, decode = pair
    expected = (await whole(decode, "whole", PROMPT, *asked(name))).token_ids
    for k in (1, 9, LENGTH - 1):
        received = decode.transfers().get("received", 0) + decode.transfers().get("cached", 0)
        leased = await whole(
            prefill, f"{name} {k}", PROMPT + expected[:k], SamplingParams(), kv=KeepKv(), cache_salt=f"{k}"
        )
        assert leased.kv is not None
        answer = await whole(
            decode,
            f"{name} {k}",
            PROMPT,
            *asked(name),
            generated_token_ids=expected[:k],
            kv=ReadKv(leased.kv),
            cache_salt=f"{k}",
        )
        assert expected[:k] + answer.token_ids == expected
        assert decode.transfers().get("received", 0) + decode.transfers().get("cached", 0) == received + 1
        assert answer.receipt is not None
        assert answer.receipt.as_json()["mode"] == f"migrated at {k}"
