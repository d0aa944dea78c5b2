"""`RequestReports`: metrics, log lines and spans of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

from worker.arguments import Arguments
from worker.engines.daemon_threads import done_in_time
from worker.errors import (
    MAX_PATH,
    BoundaryStoreUnavailable,
    Draining,
    EngineBroken,
    GrammarsUnavailable,
    InvalidRequest,
    Overloaded,
    PoisonRequest,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
    log_text,
    shown_id,
)
from worker.metrics import WorkerMetrics
from worker.request_log import RequestEntry, RequestLog
from worker.requests.response import ResponseBuilder
from worker.tracing import CLOSE_S, RequestTracer, to_endpoint

logger = logging.getLogger(__name__)

_OUTCOMES: tuple[tuple[type[ServingError], str], ...] = (
    (PoisonRequest, "poison"),
    (InvalidRequest, "refused"),
    (RequestFailed, "failed"),
    (Overloaded, "overloaded"),
    (Draining, "migrated"),
    (EngineBroken, "engine_broken"),
    (ProcessorUnavailable, "unavailable"),
    (GrammarsUnavailable, "unavailable"),
    (BoundaryStoreUnavailable, "unavailable"),
)


class RequestReports:
    """Reports of requests to operators: metrics, and where they are wanted log lines and spans.

    Attributes:
        model: Served model name.
        metrics: Metrics of the worker.
        tracer: Makes spans of requests, None without ``--otlp-endpoint``.
    """

    def __init__(self, model: str, metrics: WorkerMetrics) -> None:
        self.model = model
        self.metrics = metrics
        self.tracer: RequestTracer | None = None
        self._log: RequestLog | None = None
        self._transfers_kv = False

    def open(self, arguments: Arguments) -> None:
        """Open the request log and the tracer that the worker's options ask for."""
        self._transfers_kv = arguments.disaggregation_mode != "aggregated"
        if arguments.log_requests:
            self._log = RequestLog()
        if arguments.otlp_endpoint is not None:
            self.tracer = to_endpoint(arguments.otlp_endpoint, self.model)

    def tokens_sent(self, entry: RequestEntry, number: int) -> None:
        """Count the tokens of a chunk that is on its way to the client."""
        is_first, passed_s = entry.first_token_s is None, entry.tokens_sent()
        if not entry.is_probe:
            self.metrics.observe_tokens(number, passed_s, is_first=is_first)

    def left_engine(self, entry: RequestEntry, builder: ResponseBuilder, *, answers: bool) -> None:
        """Count the tokens of a request that the engine is done with.

        Args:
            entry: Log entry of the request.
            builder: Has counted its tokens.
            answers: Whether its answer is generated here; a prefill worker generates none.
        """
        num_generated = builder.num_generated_tokens - builder.num_replayed_tokens
        self.metrics.count_tokens(builder.num_prompt_tokens, builder.num_cached_tokens, num_generated)
        if not entry.is_probe:
            tokens = builder.num_prompt_tokens, builder.num_generated_tokens if answers else None
            self.metrics.observe_request(entry.began_s, entry.clock(), entry.queue_times, *tokens)

    def failed(self, entry: RequestEntry, error: Exception) -> None:
        """Count and log a request that ended with an error."""
        entry.failed(error)
        if not isinstance(error, ServingError):
            logger.error("request %s failed", shown_id(entry.request_id), exc_info=error)
            self.metrics.count_outcome("unknown_error")
            return
        self.metrics.count_outcome(next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "unknown_error"))
        if isinstance(error, InvalidRequest):
            self.metrics.count_refusal(error.field)
            # 1.4.2's frontend keeps the message from many clients. A bad KV transfer between
            # workers is none's fault, but theirs.
            is_theirs = self._transfers_kv and error.field.startswith("prefill_result")
            level = logging.ERROR if is_theirs else logging.WARNING
            logger.log(level, "request %s refused: %s", shown_id(entry.request_id), log_text(str(error)))

    @contextlib.contextmanager
    def reading(self, request_id: str, trace: Mapping[str, str] | None = None) -> Iterator[None]:
        """Report a request that its runtime refuses while it reads it: no server has it yet.

        Args:
            request_id: Id of the request.
            trace: Headers of the W3C trace context that its span belongs to.

        Raises:
            ServingError: what was raised, or "internal error" for an unknown one.
        """
        entry = RequestEntry(request_id=request_id[:MAX_PATH], model=self.model)  # which nobody has checked
        try:
            yield
        except Exception as error:  # the request's boundary
            self.failed(entry, error)
            self.ended(entry, trace)
            if isinstance(error, ServingError):
                raise
            raise ServingError("internal error") from error

    def ended(self, entry: RequestEntry, trace: Mapping[str, str] | None) -> None:
        """Write the line and the spans of a request that has ended."""
        if self._log is not None:
            self._log.write(entry)
        if self.tracer is not None:
            self.tracer.ended(entry, trace)

    async def close(self) -> None:
        """Write what waits. Idempotent."""
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        if self.tracer is not None:
            with contextlib.suppress(TimeoutError):  # a collector that sends a byte now and then
                await done_in_time("otlp-end", self.tracer.close, CLOSE_S)
