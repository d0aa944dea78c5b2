"""TensorRT-LLM's own metrics beside the worker's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from stand_in import collect, running

from worker.engines import Collecting
from worker.engines.trtllm import TrtllmEngine
from worker.engines.trtllm.library_metrics import LibraryMetrics
from worker.sampling import SamplingParams


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Nothing of the library stays in the process's registry."""
    yield
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith("trtllm_") for name in names):
            REGISTRY.unregister(collector)


def published(engine: TrtllmEngine) -> list[str]:
    assert isinstance(engine, Collecting)
    registry = CollectorRegistry()
    registry.register(engine)
    return generate_latest(registry).decode().splitlines()


async def test_metrics_of_the_library(model: Path) -> None:
    flags = ("--override-engine-args", '{"return_perf_metrics": true}', "--served-model-name", "m")
    async with running(model, *flags) as engine:
        for _ in range(2):
            await collect(engine, [9, 30, 41], SamplingParams(max_tokens=4))
        lines = published(engine)
    labels = '{engine_type="trtllm",model_name="m"}'
    assert f"trtllm_request_success_total{labels} 2.0" in lines
    assert any(line.startswith(f"trtllm_e2e_request_latency_seconds_count{labels} 2") for line in lines)


async def test_requests_are_not_measured_unless_that_is_wanted(model: Path) -> None:
    async with running(model) as engine:
        await collect(engine, [9, 30, 41], SamplingParams(max_tokens=4))
        assert not [line for line in published(engine) if line.startswith("trtllm_request_success_total{")]


class Old:
    """A collector of a version before `log_request_metrics_dict`, which may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.taken: list[object] = []

    def log_metrics_dict(self, metrics: object) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append(metrics)


def test_a_collector_of_an_older_version() -> None:
    collector = Old()
    metrics = LibraryMetrics(collector)
    metrics.note_statistics({"kvCacheStats": {}})
    for finished, measured in ((False, {"e2e": 1}), (True, {}), (True, {"e2e": 2})):
        metrics.note_output(SimpleNamespace(finished=finished, metrics_dict=measured))
    assert collector.taken == [{"e2e": 2}]


def test_trouble_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = LibraryMetrics(Old(KeyError("e2e")))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            metrics.note_output(SimpleNamespace(finished=True, metrics_dict={"e2e": 1}))
        assert LibraryMetrics.load("m") is None  # there is no tensorrt_llm
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "TensorRT-LLM's metrics",
        "TensorRT-LLM's metrics are not published",
    ]
