"""Smaller parts of the worker process."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from worker.errors import ConfigurationError
from worker.lifecycle.drain import DrainOutcome, InFlightRequests
from worker.lifecycle.faults import FaultWindow
from worker.metrics import OUTCOMES, WorkerMetrics
from worker.processors.smoke import SMOKE_VARIABLES, smoke_enabled

OLD, NEW = SMOKE_VARIABLES


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [
        ({}, False),
        ({OLD: "1"}, True),
        ({NEW: "1"}, True),
        ({NEW: "True"}, True),
        ({OLD: "yes", NEW: "on"}, True),
        ({NEW: "0"}, False),
        ({NEW: "false", OLD: "off"}, False),
        ({NEW: ""}, False),
    ],
)
def test_smoke_variables(environ: dict[str, str], enabled: bool) -> None:
    assert smoke_enabled(environ) is enabled


@pytest.mark.parametrize("environ", [{OLD: "2"}, {NEW: "enabled"}, {OLD: "1", NEW: "0"}])
def test_smoke_variables_that_say_nothing_clear(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r" must be true or false| contradict each other"):
        smoke_enabled(environ)


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_metrics() -> None:
    in_flight = InFlightRequests()
    metrics = WorkerMetrics(in_flight)
    assert all(sample(metrics, "dlw_requests_total", outcome=outcome) == 0 for outcome in OUTCOMES)
    in_flight.admit("a", 3)
    metrics.count_outcome("stop")
    metrics.count_tokens(3, 1, 2)
    metrics.count_drain(DrainOutcome(1, 2))
    assert sample(metrics, "dlw_requests_total", outcome="stop") == 1
    assert sample(metrics, "dlw_in_flight_requests") == 1
    assert sample(metrics, "dlw_draining") == 0
    assert sample(metrics, "dlw_tokens_total", kind="generated") == 2
    assert sample(metrics, "dlw_drain_migrated_total") == 2
    in_flight.close()
    assert sample(metrics, "dlw_draining") == 1
    with pytest.raises(ValueError, match="unknown outcome"):
        metrics.count_outcome("whatever")


def test_a_client_cannot_make_labels() -> None:
    metrics = WorkerMetrics(InFlightRequests())
    for i in range(100):
        metrics.count_refusal(f"made_up_{i}")
    metrics.count_refusal("sampling_options.n")
    assert sample(metrics, "dlw_refused_fields_total", field="other") == 100
    assert sample(metrics, "dlw_refused_fields_total", field="sampling_options.n") == 1
    assert b"made_up" not in generate_latest(metrics.registry)


def test_fault_window() -> None:
    now = [0.0]
    window = FaultWindow(limit=3, window_s=10, clock=lambda: now[0])
    assert not window.record()
    assert not window.record()
    now[0] = 10.5
    assert not window.record()  # the first is too old to count
    now[0] = 11
    assert not window.record()
    assert window.record()
