"""An engine that keeps receipts is asked for that of an answer which the worker ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry
from test_llm_engine import ARGUMENTS, INFO, FakeEngine, collect, request

from adapters.catalog import Catalog, Policy
from adapters.testing.kit_model import kit_context, kit_vocabulary
from worker.arguments import Arguments
from worker.engines import EngineInfo, TokenDelta
from worker.processors.builder import ServedChainBuilder
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.sampling import SamplingParams

TEXT = kit_vocabulary().encode("one two three four")


class Engine(FakeEngine):
    """Its deltas have no receipts."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.asked: list[tuple[str, int, int]] = []

    async def start(self) -> EngineInfo:
        return replace(INFO, vocab_size=kit_vocabulary().size)

    async def add_receipt(self, request_id: str, delta: TokenDelta, position: int) -> None:
        self.asked.append((request_id, delta.token_ids[-1], position))
        delta.engine_data = {"logits_processors": "receipt"}


def chains(arguments: Arguments, info: EngineInfo, registry: CollectorRegistry) -> ServedChainBuilder:
    return ServedChainBuilder(Catalog.default(), Policy(), "tiny", kit_context(), registry)


async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
    for token_ids in (TEXT[:1], TEXT[1:]):
        yield TokenDelta(list(token_ids))
    yield TokenDelta(finish_reason="length", engine_data={"logits_processors": "the engine's"})


async def test_the_receipt_comes_at_a_stop_string() -> None:
    engine: Any = Engine(script)
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=lambda: None, make_chains=chains)
    await worker.start(1)
    chunks = await collect(worker, request(stop_conditions={"max_tokens": 30, "stop": [" three"]}))
    sampled = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
    assert chunks[-1]["finish_reason"] == "stop"
    assert sampled == TEXT[: len(sampled)] != TEXT
    assert engine.asked == [("a", sampled[-1], 3 + len(sampled) - 1)]
    assert chunks[-1]["engine_data"] == {"logits_processors": "receipt"}
    chunks = await collect(worker, request(stop_conditions={"max_tokens": 30}), "b")
    assert chunks[-1]["engine_data"] == {"logits_processors": "the engine's"}
    assert len(engine.asked) == 1
    await worker.cleanup()
