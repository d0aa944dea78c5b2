"""Data parallel ranks of an engine, as Dynamo sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from dynamo.llm import exceptions
from test_llm_engine import ARGUMENTS, INFO, FakeEngine, chains, collect, request, two_tokens

from worker.engines import EngineInfo, KvEventSink, LoadSink
from worker.runtimes.dynamo_engine import WorkerEngine

NUM_RANKS = 3


class Ranks(FakeEngine):
    """An engine with data parallel ranks."""

    def __init__(self) -> None:
        super().__init__(two_tokens)
        self.sinks: Sequence[KvEventSink] = ()

    async def start(self) -> EngineInfo:
        return dataclasses.replace(INFO, num_dp_ranks=NUM_RANKS)

    def tell_broken(self, callback: Any) -> None:
        pass

    def tell_load(self, callback: LoadSink) -> None:
        self.tell = callback

    def report_blocks_of_ranks(self, sinks: Sequence[KvEventSink]) -> None:
        assert not self.sinks
        self.sinks = sinks


class Publisher:
    """Hears of blocks, and of the load of each rank."""

    def __init__(self) -> None:
        self.stored: list[list[int]] = []
        self.loads: list[tuple[int, int, int, float]] = []

    def publish_stored(self, token_ids: list[int], *_: Any, **names: Any) -> None:
        self.stored.append(token_ids)

    def publish(self, rank: int, snapshot: Any) -> None:
        assert snapshot.dp_rank == rank
        self.loads.append((rank, snapshot.kv_used_blocks, snapshot.kv_total_blocks, snapshot.gpu_cache_usage))


@pytest.fixture
async def started() -> tuple[WorkerEngine, Ranks]:
    engine: Any = Ranks()
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=lambda: None, make_chains=chains)
    config = await worker.start(1)
    assert config.llm is not None
    assert (config.llm.data_parallel_size, config.llm.max_num_seqs) == (NUM_RANKS, INFO.max_num_seqs)
    return worker, engine


async def test_each_rank_publishes_its_own_blocks(started: tuple[WorkerEngine, Ranks]) -> None:
    worker, engine = started
    sources: list[Any] = await worker.kv_event_sources()
    assert [source.dp_rank for source in sources] == [0, 1, 2]
    publishers = [Publisher() for _ in sources]
    for source in reversed(sources):  # the runtime says in which order
        assert not engine.sinks
        source.on_ready(publishers[source.dp_rank])
    for rank, sink in enumerate(engine.sinks):
        sink.stored(None, [1], [rank] * 4)
    assert [publisher.stored for publisher in publishers] == [[[0] * 4], [[1] * 4], [[2] * 4]]


async def test_each_rank_publishes_its_own_load(started: tuple[WorkerEngine, Ranks]) -> None:
    worker, engine = started
    assert worker.component_metrics_dp_ranks() == [0, 1, 2]
    publisher = Publisher()
    worker.attach_snapshot_publisher(publisher)
    publisher.loads.clear()
    for used, rank in ((3, 1), (3, 1), (5, 2), (12, 2)):
        engine.tell(used, 10, rank)
    assert publisher.loads == [(1, 3, 10, 0.3), (2, 5, 10, 0.5), (2, 10, 10, 1.0)]  # changes alone
    load = worker.server.kv_load
    assert (load.total, load.used) == (30, 13)


async def test_a_request_says_its_rank_and_conversation(started: tuple[WorkerEngine, Ranks]) -> None:
    worker, engine = started
    contexts: list[Any] = [None, {"session_id": " s1 ", "input_trigger": "x"}, {"session_id": " "}, {"session_id": 3}]
    for context in contexts:
        await collect(worker, request(routing={"dp_rank": 1}, agent_context=context))
    assert [(hints.dp_rank, hints.conversation) for hints in engine.hints] == [
        (1, name) for name in (None, "s1", None, None)
    ]
    for rank in (-1, "0", True):
        with pytest.raises(exceptions.InvalidArgument, match=r"routing\.dp_rank: must be the number of a rank"):
            await collect(worker, request(routing={"dp_rank": rank}))


async def test_an_engine_without_ranks_has_one() -> None:
    worker = WorkerEngine(FakeEngine(two_tokens), ARGUMENTS, shut_down=lambda: None, make_chains=chains)  # type: ignore[arg-type]
    assert worker.component_metrics_dp_ranks() == [0]
    assert await worker.kv_event_sources() == []
    await worker.start(1)
    assert [source.dp_rank for source in await worker.kv_event_sources()] == [0]
