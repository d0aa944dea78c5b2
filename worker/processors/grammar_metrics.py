"""Prometheus metrics of grammars: outcomes, times, and the cache."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from adapters.grammars.cache import GrammarCache

OUTCOMES = ("compiled", "refused", "time", "memory", "stack", "crashed", "busy", "cancelled", "unavailable")
"""Outcomes of grammars in the sandbox."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class GrammarMetrics:
    """Counters of one worker's sandbox and cache.

    Args:
        registry: Registry of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._cache: GrammarCache | None = None
        described = "Grammars that were not cached, by outcome of their compilation in the sandbox."
        self._grammars = Counter("dlw_grammars", described, ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self._grammars.labels(outcome)
        seconds = "Time that they waited and compiled there, seconds."
        self._seconds = Histogram("dlw_grammar_seconds", seconds, buckets=_SECONDS, registry=registry)

    def count(self, outcome: str, seconds: float) -> None:
        """A grammar left the sandbox; for `adapters.grammars.sandbox.GrammarSandbox`."""
        self._grammars.labels(outcome).inc()
        self._seconds.observe(seconds)

    def watch(self, cache: GrammarCache) -> None:
        """Publish the state of ``cache`` and of its sandbox whenever metrics are collected."""
        self._cache = cache
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        cache = self._cache
        if cache is None or cache.sandbox is None:
            return
        sandbox = cache.sandbox
        yield GaugeMetricFamily("dlw_grammars_waiting", "Grammars that wait to be compiled.", sandbox.num_waiting)
        yield GaugeMetricFamily("dlw_grammars_running", "Grammars that compile now.", sandbox.num_running)
        restarts = "Sandbox processes that were replaced."
        yield CounterMetricFamily("dlw_grammar_sandbox_restarts", restarts, sandbox.num_restarts)
        yield GaugeMetricFamily("dlw_grammar_cache_bytes", "Bytes of compiled grammars that are kept.", cache.num_bytes)
        lookups = CounterMetricFamily("dlw_grammar_cache_lookups", "Requests for a grammar.", labels=["result"])
        lookups.add_metric(["hit"], cache.num_hits)
        lookups.add_metric(["miss"], cache.num_misses)
        yield lookups
