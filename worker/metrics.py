"""The worker's Prometheus metrics, prefix ``dlw_``; the runtime adds its own labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.engines import EngineInfo
from worker.lifecycle.drain import DrainOutcome, InFlightRequests
from worker.migration.records import BoundaryRecords
from worker.requests.fields import FIELDS

PREFIX = "dlw_"

OUTCOMES = (
    "stop",
    "length",
    "cancelled",
    "refused",
    "poison",
    "failed",
    "overloaded",
    "unavailable",
    "migrated",
    "engine_broken",
    "unknown_error",
)
"""How a request can end; each request counts exactly once."""

_FIELD_LABELS = frozenset(row.path for row in FIELDS)


class WorkerMetrics:
    """Counters and gauges of one worker, in a registry of its own."""

    def __init__(self, in_flight: InFlightRequests) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self._refused = self._counter("refused_fields", "Refused requests by the field that was refused.", "field")
        self._tokens = self._counter("tokens", "Tokens by kind.", "kind")
        self._migrated = self._counter("drain_migrated", "Requests that a drain ended, to be migrated.")
        num_in_flight = Gauge(PREFIX + "in_flight_requests", "Requests admitted and not ended.", registry=self.registry)
        num_in_flight.set_function(lambda: len(in_flight))
        draining = Gauge(PREFIX + "draining", "1 while the worker drains and admits nothing.", registry=self.registry)
        draining.set_function(lambda: float(in_flight.closed))
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for kind in ("prompt", "cached", "generated"):
            self._tokens.labels(kind)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def watch(self, boundaries: BoundaryRecords) -> None:
        """Publish what became of migrated requests and of the boundary store."""
        self.registry.register(BoundaryMetrics(boundaries))

    def describe_engine(self, info: EngineInfo) -> None:
        """Publish what the engine is and how large."""
        described = Gauge(PREFIX + "engine_info", "Always 1.", ["engine", "version"], registry=self.registry)
        described.labels(info.name, info.version).set(1)
        sequences = Gauge(PREFIX + "max_num_seqs", "Requests decoded in one step at most.", registry=self.registry)
        sequences.set(info.max_num_seqs)

    def watch_blocks(self, num_used: Callable[[], int]) -> None:
        """Publish the KV blocks that requests own, read whenever metrics are collected."""
        used = "KV blocks that requests own: running, or pinned for transfer."
        Gauge(PREFIX + "kv_used_blocks", used, registry=self.registry).set_function(num_used)

    def count_outcome(self, outcome: str) -> None:
        if outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {outcome!r}")
        self._requests.labels(outcome).inc()

    def count_refusal(self, field: str) -> None:
        """Count a refused request by its field; a client's text never becomes a label."""
        self._refused.labels(field if field in _FIELD_LABELS else "other").inc()

    def count_tokens(self, prompt: int, cached: int, generated: int) -> None:
        for kind, number in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._tokens.labels(kind).inc(number)

    def count_drain(self, outcome: DrainOutcome) -> None:
        self._migrated.inc(outcome.num_migrated)


class BoundaryMetrics(Collector):
    """Metrics of the boundary store, read whenever they are collected."""

    def __init__(self, boundaries: BoundaryRecords) -> None:
        self._boundaries = boundaries

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        counts = {
            "continued_requests": ("Requests that went on here after another worker.", self._boundaries.num_continued),
            "replayed_tokens": ("Tokens of their answers so far.", self._boundaries.num_replayed_tokens),
            "boundary_store_failures": ("Operations that the boundary store failed.", self._boundaries.num_failures),
        }
        for name, (documentation, value) in counts.items():
            yield CounterMetricFamily(PREFIX + name, documentation, value=value)
