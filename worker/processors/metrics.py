"""Prometheus metrics of logits processors, by their names in the catalogue."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from adapters.chain import ProcessorFailed, Receipt

PREFIX = "dlw_processor_"


class ProcessorMetrics:
    """Counters of processors, fed with the receipt of every request that ends.

    Args:
        registry: Registry of the metrics.
        num_open: Breakers that are open now.
    """

    def __init__(self, registry: CollectorRegistry, num_open: Callable[[], int]) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, documentation, ("processor", *labels), registry=registry)

        self._requests = counter("requests", "Requests that ended with this processor in their chain.")
        self._steps = counter("steps", "Steps at which it asked for an edit.")
        self._seconds = counter("step_seconds", "CPU time spent in it, seconds; of built-ins an estimate.")
        self._forced = counter("forced_tokens", "Tokens that it chose.")
        self._masked = counter("masked_tokens", "Vocabulary entries that it masked, summed over steps.")
        self._errors = counter("errors", "Requests that it failed, by reason.", "reason")
        self._unsatisfiable = counter("unsatisfiable", "Requests in which it left, or met, no token to sample.")
        self._replayed = Counter(PREFIX + "replayed_tokens", "Tokens replayed to rebuild state.", registry=registry)
        breakers = Gauge(PREFIX + "breakers_open", "Third-party processors refused for now.", registry=registry)
        breakers.set_function(num_open)

    def count(self, receipt: Receipt, failure: ProcessorFailed | None) -> None:
        """Add the receipt of a request that has ended, and the failure that ended it, if any."""
        self._replayed.inc(receipt.replayed)
        for name in {record.name for record in receipt.records}:  # a request may have one more than once
            self._requests.labels(name).inc()
        for record in receipt.records:
            self._steps.labels(record.name).inc(record.steps_active)
            self._seconds.labels(record.name).inc(record.seconds)
            self._forced.labels(record.name).inc(record.tokens_forced)
            self._masked.labels(record.name).inc(record.tokens_masked)
        if failure is not None:
            self.count_failure(failure.processor, failure.reason)

    def count_failure(self, processors: str, reason: str) -> None:
        """Count a request that processors failed.

        Args:
            processors: Names, separated by ``", "``.
            reason: See `ProcessorFailed`.
        """
        for name in processors.split(", "):  # several may be to blame: a label each, not one per combination
            self._errors.labels(name, reason).inc()
            if reason == "unsatisfiable":
                self._unsatisfiable.labels(name).inc()
