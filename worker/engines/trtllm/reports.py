"""Reports of TensorRT-LLM's executor to the runtime: load of the KV cache, and KV events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from worker.engines import LoadSink
from worker.engines.forward_pass import ForwardPassSink
from worker.engines.trtllm.cache_reports import EventRelay, dp_rank, forward_pass, kv_blocks
from worker.engines.trtllm.library_metrics import LibraryMetrics

logger = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Pause between polls without a result."""

MAX_PAUSE_S = 5.0
"""Longest pause between polls that fail."""


class ExecutorReports:
    """Polls the executor's reports; each method runs until its task is cancelled.

    An unreadable record is skipped, and an executor that does not answer is polled again: its
    liveness is the concern of `health.Watch`. Each problem is logged once.

    Args:
        llm: The library's ``LLM``.
        metrics: TensorRT-LLM's own metrics, None if the version has none.

    Attributes:
        on_load: Called with used and total KV blocks whenever the executor reports them.
        on_pass: Called with each forward pass that the executor reports.
    """

    def __init__(self, llm: Any, metrics: LibraryMetrics | None = None) -> None:
        self._llm = llm
        self._metrics = metrics
        self.on_load: LoadSink | None = None
        self.on_pass: ForwardPassSink | None = None

    async def poll_load(self) -> None:
        """Forward the executor's statistics to `on_load` and `on_pass`."""

        def take(record: Mapping[str, Any]) -> None:
            if self._metrics is not None:
                self._metrics.note_statistics(record)
            found = kv_blocks(record)
            if found is not None and self.on_load is not None:
                self.on_load(*found, dp_rank(record))
            if self.on_pass is not None:
                self.on_pass(forward_pass(record))

        await _poll("statistics", lambda: self._llm.get_stats_async(timeout=1), take)

    async def poll_events(self, relays: Sequence[EventRelay]) -> None:
        """Forward KV events to `relays`, one for each attention data parallel rank."""

        def take(event: Mapping[str, Any]) -> None:
            relays[dp_rank(event)].take(event)

        await _poll("KV events", lambda: self._llm.get_kv_cache_events_async(timeout=1), take)


async def _poll(
    what: str, ask: Callable[[], AsyncIterator[Mapping[str, Any]]], take: Callable[[Mapping[str, Any]], None]
) -> None:
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
