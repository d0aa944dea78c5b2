"""The worker's Prometheus metrics, prefix ``dlw_``; the runtime adds its own labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric

from worker.engines import EngineInfo, Speculating
from worker.lifecycle.drain import DrainOutcome, InFlightRequests
from worker.requests.fields import FIELDS

PREFIX = "dlw_"

OUTCOMES = (
    "stop",
    "length",
    "cancelled",
    "refused",
    "failed",
    "overloaded",
    "unavailable",
    "migrated",
    "engine_broken",
    "unknown_error",
)
"""How a request can end; each request counts exactly once."""

_FIELD_LABELS = frozenset(row.path for row in FIELDS)


class SpeculationMetrics:
    """Drafted tokens of an engine by proposer, read from it whenever they are collected.

    Args:
        engine: The engine.
        registry: Where the metrics go.
    """

    def __init__(self, engine: Speculating, registry: CollectorRegistry) -> None:
        self._engine = engine
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        found = self._engine.speculation()
        for index, name in enumerate(("proposed", "accepted")):
            what = "computed" if name == "proposed" else "accepted"
            described = f"Drafted tokens that were {what}, by proposer."
            tokens = CounterMetricFamily(f"{PREFIX}speculation_{name}_tokens", described, labels=["proposer"])
            for proposer, counts in found.items():
                tokens.add_metric([proposer], counts[index])
            yield tokens


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

    def describe_engine(self, info: EngineInfo) -> None:
        """Publish what the engine is and how large."""
        described = Gauge(PREFIX + "engine_info", "Always 1.", ["engine", "version"], registry=self.registry)
        described.labels(info.name, info.version).set(1)
        sequences = Gauge(PREFIX + "max_num_seqs", "Requests decoded in one step at most.", registry=self.registry)
        sequences.set(info.max_num_seqs)

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
