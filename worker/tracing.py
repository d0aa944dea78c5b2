"""OpenTelemetry spans of requests, with GenAI semantic conventions.

They are made when a request has ended, from the times in its `RequestEntry`, so that nothing is
done while it runs. OpenTelemetry is imported here alone, and only with ``--otlp-endpoint``.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from worker import __version__
from worker.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

    from worker.request_log import RequestEntry

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 3.0
"""Longest wait for a collector that does not answer, seconds."""

CLOSE_S = EXPORT_TIMEOUT_S + 1.0
"""Longest wait for a collector at the end of the process, seconds."""

PROVIDER = "dynamo"
OPERATION = "text_completion"
"""``gen_ai.provider.name`` and ``gen_ai.operation.name``: a worker sees tokens, not messages."""

_PARAMETERS = {name: f"gen_ai.request.{name}" for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_endpoint(endpoint: str | None) -> None:
    """Raises `ConfigurationError` if spans are wanted and cannot be made."""
    if endpoint is None:
        return
    for name in _NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # not even the package around it
            found = None
        if found is None:
            raise ConfigurationError(f"--otlp-endpoint needs {name}: pip install 'dynamo-logits-worker[otel]'")


def to_endpoint(endpoint: str, model: str) -> RequestTracer:
    """A tracer that sends spans to an OTLP endpoint, from a thread of its own.

    Args:
        endpoint: URL that takes spans over HTTP as protobuf.
        model: Served model name.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "dynamo-logits-worker", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)))
    return RequestTracer(provider, model)


class RequestTracer:
    """Makes the spans of requests that have ended.

    Args:
        provider: Provider of the spans' tracer.
        model: Served model name.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("worker.tracing", __version__)
        self._model = model

    def ended(self, entry: RequestEntry, headers: Mapping[str, str] | None) -> None:
        """Record a request. What goes wrong here is logged; the request is not touched.

        Args:
            entry: Log entry of the request, which has ended now.
            headers: W3C trace context that it came with.
        """
        if entry.is_probe:
            return
        try:
            self._record(entry, headers)
        except Exception:  # the boundary of another library
            logger.exception("no spans of request %s", entry.request_id)

    def _record(self, entry: RequestEntry, headers: Mapping[str, str] | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended_s = entry.clock()
        offset_ns = time.time_ns() - round(ended_s * 1e9)

        def at(moment_s: float) -> int:
            return round(moment_s * 1e9) + offset_ns

        whole = self._tracer.start_span(
            f"{OPERATION} {self._model}",
            TraceContextTextMapPropagator().extract(dict(headers or {})),
            SpanKind.SERVER,
            self._attributes(entry),
            start_time=at(entry.began_s),
        )
        if entry.error is not None:
            whole.set_status(Status(StatusCode.ERROR, entry.error))
        inside = set_span_in_context(whole)
        for name, began_s, stopped_s in phases(entry, ended_s):
            self._tracer.start_span(name, inside, start_time=at(began_s)).end(at(stopped_s))
        self._failures(entry, inside, at(ended_s))
        whole.end(at(ended_s))

    def _failures(self, entry: RequestEntry, inside: Context, now_ns: int) -> None:
        from opentelemetry.trace import Status, StatusCode

        if entry.failure is None:
            return
        for name in entry.failure.processor.split(", "):  # several may be to blame
            attributes = {"dlw.processor.name": name, "dlw.processor.reason": entry.failure.reason}
            span = self._tracer.start_span(f"logits_processor {name}", inside, attributes=attributes, start_time=now_ns)
            span.set_status(Status(StatusCode.ERROR, entry.failure.reason))
            span.end(now_ns)

    def _attributes(self, entry: RequestEntry) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": entry.request_id,
            "dlw.logits_processors": list(entry.processors),
        }
        for name, attribute in _PARAMETERS.items():
            value = None if entry.params is None else getattr(entry.params, name)
            if value is not None and -(2**63) <= value < 2**63:  # what an attribute can hold
                found[attribute] = value
        if entry.builder is not None:
            found["gen_ai.usage.input_tokens"] = entry.builder.num_prompt_tokens
            found["gen_ai.usage.output_tokens"] = entry.builder.num_generated_tokens
            found["gen_ai.usage.cache_read.input_tokens"] = entry.builder.num_cached_tokens
        if entry.finish_reason is not None:
            found["gen_ai.response.finish_reasons"] = [entry.finish_reason]
        if entry.error is not None:
            found["error.type"] = entry.error
        return found

    def close(self) -> None:
        """Send what waits. Idempotent; blocks, for seconds where the collector does not answer."""
        self._provider.shutdown()


def phases(entry: RequestEntry, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of the phases that a request went through, by its clock."""
    if entry.params is None:
        return
    queue, began_s = entry.queue_times, entry.began_s
    if queue is not None:
        yield "queue", began_s, max(began_s, queue.allocated_s)
        if queue.received_s is not None:
            yield "transfer", queue.allocated_s, queue.received_s
        if queue.admitted_s > queue.ready_s:
            yield "slot", queue.ready_s, queue.admitted_s
        began_s = max(began_s, queue.admitted_s)
    if entry.first_token_s is None:
        yield "prefill", began_s, ended_s
    else:
        yield "prefill", began_s, entry.first_token_s
        yield "decode", entry.first_token_s, ended_s
