"""The worker's Prometheus metrics, prefix ``dlw_``; the runtime adds its own labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.engines import BATCH_SIZES, EngineInfo, EngineLoad, Measured, QueueTimes, ServingEngine
from worker.engines.weights import ChangesWeights
from worker.lifecycle.drain import DrainOutcome, InFlightRequests
from worker.migration.records import BoundaryRecords
from worker.requests.fields import FIELDS

PREFIX = "dlw_"

OUTCOMES = (
    "stop",
    "length",
    "abort",
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
"""Outcomes of requests; each request counts exactly once."""

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
"""Buckets of histograms: seconds, and tokens of one request."""

_FIELD_LABELS = frozenset(row.path for row in FIELDS)


class WorkerMetrics:
    """Counters and gauges of one worker, in a registry of its own."""

    def __init__(self, in_flight: InFlightRequests) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self._refused = self._counter("refused_fields", "Refused requests by the field that was refused.", "field")
        self._tokens = self._counter("tokens", "Tokens by kind.", "kind")
        self._migrated = self._counter("drain_migrated", "Requests that a drain ended, to be migrated.")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token, seconds.", FIRST_TOKEN_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between tokens of an answer, seconds.", INTER_TOKEN_S
        )
        self._queue = self._histogram("queue_time_seconds", "Time in the waiting queue, seconds.", QUEUE_S)
        self._transfer = self._histogram(
            "kv_transfer_seconds", "Time that a request waited for its prompt's KV, seconds.", QUEUE_S
        )
        self._duration = self._histogram(
            "request_duration_seconds", "Time from a request's arrival to its end, seconds.", REQUEST_S
        )
        self._prompt = self._histogram("prompt_length_tokens", "Tokens of a prompt.", TOKENS)
        self._answer = self._histogram("answer_length_tokens", "Tokens of an answer.", TOKENS)
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

    def watch_weights(self, engine: ServingEngine, counts: Mapping[str, int]) -> None:
        """Publish the version of an engine's weights, and its updates by outcome."""
        self.registry.register(WeightMetrics(engine, counts))

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, documentation, buckets=buckets, registry=self.registry)

    def describe_engine(self, info: EngineInfo) -> None:
        """Publish what the engine is and how large."""
        described = Gauge(PREFIX + "engine_info", "Always 1.", ["engine", "version"], registry=self.registry)
        described.labels(info.name, info.version).set(1)
        sequences = Gauge(PREFIX + "max_num_seqs", "Requests decoded in one step at most.", registry=self.registry)
        sequences.set(info.num_slots)

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

    def observe_tokens(self, number: int, passed_s: float, *, is_first: bool) -> None:
        """Tokens of one chunk.

        Args:
            number: Number of tokens, at least 1; several share the time equally.
            passed_s: Seconds since the chunk before, or since the request came.
            is_first: No token came before.
        """
        if is_first:
            self._first_token.observe(passed_s)
            return
        for _ in range(number):
            self._inter_token.observe(passed_s / number)

    def observe_request(
        self, began_s: float, ended_s: float, queue_times: QueueTimes | None, prompt: int, generated: int | None
    ) -> None:
        """An admitted request has ended.

        Args:
            began_s: Time of its arrival; monotonic, like the other times.
            ended_s: Time of its end.
            queue_times: Times at which it left the waiting queue, None if it did not, or unknown.
            prompt: Tokens of its prompt.
            generated: Tokens of its answer, None where it has none: on a prefill worker.
        """
        self._duration.observe(ended_s - began_s)
        self._prompt.observe(prompt)
        if generated is not None:
            self._answer.observe(generated)
        if queue_times is not None:
            for_a_slot = queue_times.admitted_s - queue_times.ready_s
            self._queue.observe(max(0.0, queue_times.allocated_s - began_s) + for_a_slot)
            if queue_times.received_s is not None:
                self._transfer.observe(queue_times.received_s - queue_times.allocated_s)

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


class WeightMetrics(Collector):
    """Metrics of weights that change, read whenever they are collected."""

    def __init__(self, engine: ServingEngine, counts: Mapping[str, int]) -> None:
        self._engine = engine
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        weights = self._engine.weights if isinstance(self._engine, ChangesWeights) else None
        if weights is not None:
            version = "Updates of the weights since the start: the number of their version."
            yield GaugeMetricFamily(PREFIX + "weight_version", version, weights.weight_version.number)
            paused = "1 while the engine is paused, asleep, or waits for weights."
            yield GaugeMetricFamily(PREFIX + "engine_paused", paused, weights.weights_state != "serving")
        updates = CounterMetricFamily(
            PREFIX + "weight_updates", "Updates of the weights by outcome.", labels=["outcome"]
        )
        for outcome, number in self._counts.items():
            updates.add_metric([outcome], number)
        yield updates


class LoadMetrics:
    """Queues, batches, KV use and drafts of an engine, read from it whenever they are collected.

    Args:
        engine: The engine.
        info: Description of the engine.
        registry: Registry of the metrics.
    """

    def __init__(self, engine: Measured, info: EngineInfo, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._info = info
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        load = self._engine.load()
        gauges = (
            ("waiting_requests", "Requests that wait, held back before the queue among them.", load.num_waiting),
            ("running_requests", "Requests in the batch.", load.num_running),
            ("kv_used_blocks", "KV blocks that requests own: running, or pinned for transfer.", load.num_used_blocks),
            ("kv_total_blocks", "KV blocks that the engine owns.", self._info.total_kv_blocks),
        )
        for name, documentation, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, documentation, value)
        yield CounterMetricFamily(
            PREFIX + "preemptions", "Requests that were preempted, each time.", load.num_preemptions
        )
        yield _batch_sizes(load)
        for index, name in enumerate(("proposed", "accepted")):
            what = "computed" if name == "proposed" else "accepted"
            described = f"Drafted tokens that were {what}, by proposer."
            tokens = CounterMetricFamily(f"{PREFIX}speculation_{name}_tokens", described, labels=["proposer"])
            for proposer, counts in load.drafted.items():
                tokens.add_metric([proposer], counts[index])
            yield tokens


def _batch_sizes(load: EngineLoad) -> HistogramMetricFamily:
    bounds = (*(f"{size:.1f}" for size in BATCH_SIZES), "+Inf")
    buckets = list(zip(bounds, map(float, accumulate(load.steps_by_batch_size)), strict=True))
    return HistogramMetricFamily(PREFIX + "batch_size_rows", "Sampled rows of a step.", buckets, load.num_rows)
