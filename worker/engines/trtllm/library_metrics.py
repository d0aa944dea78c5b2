"""TensorRT-LLM's own Prometheus metrics, ``trtllm_*``, which its ``MetricsCollector`` keeps in
prometheus_client's registry.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, Metric

logger = logging.getLogger(__name__)

PREFIX = "trtllm_"


def collected() -> list[Metric]:
    """The library's metrics of now."""
    return [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]


class LibraryMetrics:
    """Feeds the library's collector, as Dynamo's own worker does.

    Trouble with it is logged once and touches no request.

    Args:
        collector: The library's ``MetricsCollector``.
    """

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        # newer versions have renamed it
        self._log_request = getattr(collector, "log_request_metrics_dict", None) or collector.log_metrics_dict
        self._log_statistics = getattr(collector, "log_iteration_stats", None)
        self._has_failed = False

    @classmethod
    def load(cls, model_name: str) -> LibraryMetrics | None:
        """The metrics of the installed version, None if it has none.

        Args:
            model_name: Label ``model_name``.
        """
        try:
            module = importlib.import_module("tensorrt_llm.metrics")
            return cls(module.MetricsCollector({"model_name": model_name, "engine_type": "trtllm"}))
        except Exception as error:  # the library's boundary: whatever its module runs into
            logger.info("TensorRT-LLM's metrics are not published: %s: %s", type(error).__name__, error)
            return None

    def note_output(self, output: Any) -> None:
        """Count a request if this output is its last one, and has measurements: with
        ``return_perf_metrics``.
        """
        if output.finished and output.metrics_dict:
            self._fed(self._log_request, output.metrics_dict)

    def note_statistics(self, record: Mapping[str, Any]) -> None:
        """Take one record of the executor's statistics."""
        if self._log_statistics is not None:
            self._fed(self._log_statistics, record)

    def _fed(self, take: Callable[[Any], None], record: Any) -> None:
        try:
            take(record)
        except Exception as error:  # the library's boundary
            if not self._has_failed:
                logger.warning("TensorRT-LLM's metrics: %s: %s", type(error).__name__, error)
            self._has_failed = True
