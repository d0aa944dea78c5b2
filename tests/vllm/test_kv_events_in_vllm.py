"""vLLM's own publisher of KV events, and its engine, before the worker's subscription."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from engine import default_model
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from worker.engines import EngineRequest
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.kv_events import KvEvents
from worker.sampling import SamplingParams

WAIT_S = 30.0
BLOCK = 32


class Router:
    """Records what a router is told."""

    def __init__(self) -> None:
        self.stored_blocks: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.known: set[int] = set()

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        self.known.update(block_hashes)
        self.stored_blocks.put_nowait((parent_hash, list(block_hashes), list(token_ids), cache_salt))

    def removed(self, block_hashes: Sequence[int]) -> None:
        self.known.difference_update(block_hashes)

    async def knows(self, *block_hashes: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.known != set(block_hashes):
                await asyncio.sleep(0.01)


@contextmanager
def publisher(events: KvEvents, **options: Any) -> Iterator[ZmqEventPublisher]:
    settings = {key: value for key, value in events.config.items() if "endpoint" in key}
    made = ZmqEventPublisher(0, **settings, **options)
    try:
        yield made
    finally:
        made.shutdown()


@asynccontextmanager
async def followed(**options: Any) -> AsyncIterator[tuple[KvEvents, ZmqEventPublisher, Router]]:
    events = KvEvents()
    try:
        with publisher(events, **options) as made:
            yield events, made, Router()
    finally:
        await events.close()


def stored(number: int, parent: int | None = None) -> KVEventBatch:
    """A block of its own, or behind another one."""
    event = BlockStored([number], parent, [number, number], 2, None, "GPU", None, [None], 0, "full_attention")
    return KVEventBatch(ts=0.0, events=[event])


async def test_events_before_the_subscription_are_asked_for() -> None:
    async with followed() as (events, made, router):
        made.publish(stored(1))
        made.publish(stored(2, parent=1))
        await asyncio.to_thread(made._event_queue.join)
        events.follow(router, 2)
        await router.knows(1, 2)
        made.publish(KVEventBatch(ts=0.0, events=[BlockRemoved([2], "GPU", 0)]))
        await router.knows(1)
        made.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
        await router.knows()


async def test_a_lost_message_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async with followed() as (events, made, router):
        made.publish(stored(1))
        events.follow(router, 2)
        await router.knows(1)
        lose_next(made)
        made.publish(stored(2))
        made.publish(stored(3))
        await router.knows(1, 2, 3)
    assert "lost" not in caplog.text


async def test_what_vllm_has_forgotten_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """It repeats ``buffer_steps`` messages: an eviction may have been among earlier ones."""
    async with followed(buffer_steps=1) as (events, made, router):
        made.publish(stored(1))
        events.follow(router, 2)
        await router.knows(1)
        lose_next(made)
        made.publish(KVEventBatch(ts=0.0, events=[BlockRemoved([1], "GPU", 0)]))
        await asyncio.to_thread(made._event_queue.join)
        made.publish(stored(3))
        await router.knows(3)
    assert "KV events 1 to 1 of vLLM were lost" in caplog.text


def lose_next(made: ZmqEventPublisher) -> None:
    """Let the publisher send its next message to nobody."""
    socket = made._pub

    class Deaf:
        def send_multipart(self, parts: Any) -> None:
            made._pub = socket

        def close(self, linger: int) -> None:
            socket.close(linger)

    made._pub = Deaf()


async def test_an_engine_tells_its_blocks_and_its_load() -> None:
    options = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 256, "block_size": BLOCK}
    config = VllmConfig(
        model_path=str(default_model()), has_events=True, options=options | {"num_gpu_blocks_override": 16}
    )
    engine, router, loads = VllmEngine(config), Router(), list[tuple[int, int]]()

    async def cached(prompt: list[int], salt: str | None = None) -> int:
        request = EngineRequest("r", prompt, SamplingParams(max_tokens=2, ignore_eos=True), cache_salt=salt)
        return max([delta.num_cached_tokens async for delta in engine.generate(request)])

    prompt = list(range(1000, 1000 + 3 * BLOCK + 1))
    try:
        info = await engine.start()
        engine.tell_load(lambda used, total: loads.append((used, total)))
        assert await cached(prompt) == 0
        engine.report_blocks(router)
        for salt in (None, "tenant"):
            cold, warm = await cached(prompt, salt), await cached(prompt, salt)
            assert (cold, warm) == (3 * BLOCK if salt is None else 0, 3 * BLOCK)
            async with asyncio.timeout(WAIT_S):
                parent, hashes, tokens, told = await router.stored_blocks.get()
            assert (parent, len(set(hashes)), tokens, told) == (None, 3, prompt[:-1], salt)
        assert len(router.known) == 6
        for number in range(4):  # 3 blocks each, and 15 in all
            await cached([2000 + number] * (3 * BLOCK + 1), "other")
        async with asyncio.timeout(WAIT_S):
            while router.stored_blocks.qsize() < 4:
                await asyncio.sleep(0.01)
        newest = [hashes for _, hashes, _, _ in (router.stored_blocks.get_nowait() for _ in range(4))]
        assert router.known.issuperset(newest[-1])
        assert len(router.known) <= 15
        assert max(used for used, _ in loads) == 4
        assert {total for _, total in loads} == {info.total_kv_blocks} == {16}
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
        assert load.num_rows >= sum(load.steps_by_batch_size) >= 16
        names = {metric.name for metric in engine.collect()}
        assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= names
    finally:
        await engine.stop()
