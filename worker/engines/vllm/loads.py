"""The load of vLLM's scheduler, which ``AsyncLLM`` tells its loggers of statistics."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from worker.engines import BATCH_SIZES, EngineLoad

logger = logging.getLogger(__name__)

_TRANSFERS = {"bytes_transferred": "bytes", "transfer_duration": "seconds", "num_kv_expired_reqs": "timed_out"}
"""Names of the connector's statistics, and what their sums are here."""


class LoadReports:
    """A logger of vLLM's statistics that keeps the newest ones; also its own factory.

    vLLM calls it in the worker's event loop. Statistics that it cannot read are logged once.

    Attributes:
        on_load: Called with used and total KV blocks at each step.
        transfers: Totals of the KV connector's statistics: ``bytes`` and ``seconds`` of what was
            pulled, and leases that ``timed_out``.
    """

    def __init__(self) -> None:
        self.on_load: Callable[[int, int], None] | None = None
        self._total = 0
        self._waiting = self._running = self._used = 0
        self._preemptions = self._rows = 0
        self._steps = [0] * (len(BATCH_SIZES) + 1)
        self._is_told = False
        self.transfers: dict[str, float] = {}

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> LoadReports:
        """Return the logger itself, as vLLM calls it to make one."""
        self._total = int(vllm_config.cache_config.num_gpu_blocks or 0)
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take the statistics of a step; vLLM calls it."""
        try:
            if iteration_stats is not None:
                self._note_step(iteration_stats)
            if scheduler_stats is not None:
                self._note_queues(scheduler_stats)
        except Exception as error:  # the engine's boundary: these classes are not stable
            if not self._is_told:
                self._is_told = True
                logger.warning("vLLM's statistics cannot be read: %s: %s", type(error).__name__, error)

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM calls it."""

    def log(self) -> None:
        """Does nothing; vLLM calls it."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing; vLLM calls it."""

    def load(self) -> EngineLoad:
        """The load at the newest step; see `worker.engines.Measured`."""
        return EngineLoad(
            num_waiting=self._waiting,
            num_running=self._running,
            num_used_blocks=self._used,
            num_preemptions=self._preemptions,
            steps_by_batch_size=tuple(self._steps),
            num_rows=self._rows,
        )

    def _note_step(self, stats: Any) -> None:
        """One token is sampled for each row; steps that sample none do not count."""
        self._preemptions += int(stats.num_preempted_reqs)
        rows = int(stats.num_generation_tokens)
        if rows:
            self._rows += rows
            self._steps[bisect_left(BATCH_SIZES, rows)] += 1

    def _note_queues(self, stats: Any) -> None:
        self._running = int(stats.num_running_reqs)
        self._waiting = int(stats.num_waiting_reqs) + int(getattr(stats, "num_skipped_waiting_reqs", 0))
        self._used = round(stats.kv_cache_usage * (self._total - 1))  # the first block holds nothing
        for name, ours in _TRANSFERS.items():
            measured = (getattr(stats, "kv_connector_stats", None) or {}).get(name)
            if measured:
                self.transfers[ours] = self.transfers.get(ours, 0) + sum(measured)
        if self.on_load is not None:
            self.on_load(self._used, self._total)
