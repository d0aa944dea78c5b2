"""vLLM's statistics as the worker's load and metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import CONFIG, running
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from worker.engines import Collecting, Measured
from worker.engines.vllm.loads import LoadReports


def queues(running: int, waiting: int, usage: float, deferred: int = 0) -> Any:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=deferred,
        kv_cache_usage=usage,
    )


def step(rows: int, preempted: int = 0) -> Any:
    return SimpleNamespace(num_generation_tokens=rows, num_preempted_reqs=preempted)


def test_the_newest_statistics_are_the_load() -> None:
    told: list[tuple[int, int]] = []
    reports = LoadReports()(CONFIG, 0)
    reports.on_load = lambda used, total: told.append((used, total))
    reports.record(queues(2, 1, 1.0, deferred=2), step(2), mm_cache_stats=None, engine_idx=0)
    reports.record(queues(1, 0, 3 / 99), step(5, preempted=1))
    reports.record(None, step(0))
    load = reports.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_preemptions) == (1, 0, 3, 1)
    assert (load.num_rows, load.steps_by_batch_size[:5]) == (7, (0, 1, 0, 1, 0))
    assert told == [(99, 100), (3, 100)]  # the first of vLLM's 100 blocks holds nothing
    reports.record(queues(0, 3, 0.0), None)
    assert (reports.load().num_waiting, told[-1]) == (3, (0, 100))


def test_statistics_of_an_unknown_form_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reports = LoadReports()
    for _ in range(2):
        reports.record(SimpleNamespace(queue_depth=3), None)
    assert len(caplog.records) == 1
    assert "vLLM's statistics cannot be read: AttributeError" in caplog.text
    assert reports.load().num_running == 0


async def test_an_engine_has_vllms_statistics_and_metrics() -> None:
    gauge = Gauge("vllm:fake_depth", "Of this test.", registry=REGISTRY)
    try:
        async with running() as (engine, llm):
            assert isinstance(engine, Measured)
            assert isinstance(engine, Collecting)
            (logger,) = llm.loggers
            logger.record(queues(1, 2, 0.0), None)
            assert (engine.load().num_running, engine.load().num_waiting) == (1, 2)
            registry = CollectorRegistry()
            registry.register(engine)
            gauge.set(3)
            assert registry.get_sample_value("vllm:fake_depth") == 3
            assert all(metric.name.startswith("vllm:") for metric in registry.collect())
    finally:
        REGISTRY.unregister(gauge)
