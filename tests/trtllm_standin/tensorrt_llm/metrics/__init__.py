"""The library's Prometheus metrics, in the process's registry."""

from __future__ import annotations

from typing import Any, Dict

from prometheus_client import REGISTRY, Counter, Gauge, Histogram


class MetricsCollector:
    def __init__(self, labels: Dict[str, str]) -> None:
        for collector in list(REGISTRY._collector_to_names):  # of a stand-in that was imported before
            if any(name.startswith("trtllm_") for name in REGISTRY._collector_to_names[collector]):
                REGISTRY.unregister(collector)
        names, self._values = list(labels), list(labels.values())
        self._requests = Counter("trtllm_request_success", "Requests that ended.", names)
        self._latency = Histogram("trtllm_e2e_request_latency_seconds", "From arrival to end.", names)
        self._used = Gauge("trtllm_kv_cache_utilization", "Used part of the KV cache.", names)

    def log_request_metrics_dict(self, metrics_dict: Dict[str, Any]) -> None:
        self._requests.labels(*self._values).inc()
        self._latency.labels(*self._values).observe(metrics_dict["e2e"])

    def log_iteration_stats(self, stats: Dict[str, Any]) -> None:
        cache = stats["kvCacheStats"]
        self._used.labels(*self._values).set(cache["usedNumBlocks"] / cache["maxNumBlocks"])
