"""What the engine reports to the runtime: executor failure, KV cache load, KV events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from worker.engines import EngineInfo, KvEventSink
from worker.engines.trtllm.cache_reports import EventRelay, kv_blocks
from worker.engines.trtllm.settings import TrtllmConfig

logger = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Pause between polls without a result."""

MAX_PAUSE_S = 5.0
"""Longest pause between polls that fail."""


class RuntimeReports:
    """The part of `TrtllmEngine` that reports to the runtime.

    Args:
        config: Settings.
    """

    def __init__(self, config: TrtllmConfig) -> None:
        self.config = config
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._loop: asyncio.AbstractEventLoop
        self._tasks: list[asyncio.Task[None]] = []
        self._on_broken: Callable[[str], None] | None = None
        self._on_load: Callable[[int, int], None] | None = None

    def tell_broken(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason when the executor dies, with or without requests."""
        self._on_broken = callback

    def tell_load(self, callback: Callable[[int, int], None]) -> None:
        """Call ``callback`` with used and total KV blocks whenever the executor reports them."""
        self._on_load = callback

    def num_leased(self) -> int:
        """Always 0: TensorRT-LLM pins and transfers KV itself."""
        return 0

    def transfers(self) -> Mapping[str, float]:
        """Always empty: TensorRT-LLM transfers KV itself."""
        return {}

    def report_blocks(self, sink: KvEventSink) -> None:
        """Report the cached prefixes to `sink`, if the event buffer is on. Thread-safe."""
        assert self._info is not None
        if not self.has_events:
            return
        relay = EventRelay(sink, self._info.kv_block_size)
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(self._relay(relay))))

    @property
    def has_events(self) -> bool:
        """Whether KV events are recorded."""
        cache = self.config.options.get("kv_cache_config") or {}
        return int(cache.get("event_buffer_max_size") or 0) > 0

    async def _report_load(self) -> None:
        def take(record: Mapping[str, Any]) -> None:
            found = kv_blocks(record)
            if found is not None and self._on_load is not None:
                self._on_load(*found)

        await self._poll("statistics", lambda: self._llm.get_stats_async(timeout=1), take)

    async def _relay(self, relay: EventRelay) -> None:
        await self._poll("KV events", lambda: self._llm.get_kv_cache_events_async(timeout=1), relay.take)

    async def _poll(
        self,
        what: str,
        ask: Callable[[], AsyncIterator[Mapping[str, Any]]],
        take: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Forward the executor's reports until this task is cancelled.

        An unreadable record is skipped, and an executor that does not answer is polled again: its
        liveness is the concern of `health.Watch`. Each problem is logged once.
        """
        pause, told = PAUSE_S, ""
        while True:
            problem = ""
            try:
                async for record in ask():
                    problem = _taken(take, record) or problem
                pause = PAUSE_S
            except Exception as error:  # the engine's boundary
                problem, pause = f"{type(error).__name__}: {error}", min(2 * pause, MAX_PAUSE_S)
            if problem and problem != told:
                told = problem
                logger.warning("TensorRT-LLM's %s: %s", what, problem)
            await asyncio.sleep(pause)


def _taken(take: Callable[[Mapping[str, Any]], None], record: Mapping[str, Any]) -> str:
    """Forward one record; returns why it was impossible, else an empty string."""
    try:
        take(record)
    except Exception as error:  # the engine boundary: an unknown form of records
        return f"a record was skipped: {type(error).__name__}: {error}"
    return ""
