"""The part of a request that a worker serves: all of it, its prefill, or its decode."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from adapters.catalog import Selection
from worker.disaggregation.seal import SECRET, Seal
from worker.engines import KeepKv, KvPart, LocalPrefill, ReadKv, ServingEngine, TokenDelta
from worker.engines.embedded.transfer import params
from worker.errors import KV_TRANSFER_FIELD, ConfigurationError, InvalidRequest, Overloaded
from worker.lifecycle.drain import InFlightRequest
from worker.requests.request import GenerationRequest

Role = Literal["aggregated", "prefill", "decode"]

OUTCOMES = ("leased", "released", "timed_out", "received", "cached", "expired", "lost", "cancelled")
"""Outcomes of KV transfers, as in `KvConnector.counts` of the embedded engine."""

LOCAL_REASONS = ("missing", "late", "version", "expired", "lost", "dropped")
"""Reasons of local prefills: no KV transfer came with the request, or one whose lease was over by
the clock, or whose parameters are of another version; the lease ended before the KV was read, or
it could not be read; or this worker has dropped its KV, as when its weights change.
"""

logger = logging.getLogger(__name__)


class DisaggregatedServing:
    """A worker's role in disaggregated serving. One event loop only.

    A decode worker without a KV transfer that it can use computes the prompt itself (a local
    prefill): whatever became of the prefill worker, the client gets the same tokens. The number of
    local prefills at a time is bounded, so that decoding is not slowed by more.

    Args:
        role: Disaggregation mode of the worker.
        seal: Signs the parameters of KV transfers; needed by prefill and decode workers.
        lease_s: Seconds after which a prefill worker's lease on KV times out.
        max_local_prefills: Local prefills at a time at most.

    Attributes:
        role: Disaggregation mode of the worker.
        counts: Local prefills by reason, as far as they were decided here.
    """

    def __init__(self, role: str, seal: Seal | None, lease_s: float, max_local_prefills: int) -> None:
        if role != "aggregated" and seal is None:
            raise ConfigurationError(f"--disaggregation-mode {role} needs {SECRET}")
        self.role = role
        self._seal = seal
        self._lease_s = lease_s
        self._max_local = max_local_prefills
        self._local: dict[str, InFlightRequest] = {}
        self.counts: Counter[str] = Counter()

    @property
    def num_local_prefills(self) -> int:
        """Local prefills under way."""
        return len(self._local)

    @property
    def only_prefills(self) -> bool:
        """Whether answers begin in another worker."""
        return self.role == "prefill"

    def kv_of(self, request: GenerationRequest, selection: Selection) -> KvPart | None:
        """The part of this worker's engine in the KV transfer of a request, None if it has none.

        A health probe is served whole by whichever worker gets it.

        Raises:
            InvalidRequest: its KV transfer was not signed by this pool, was made for another
                request, or came to a worker that does not decode.
        """
        if self.role != "decode":
            if request.prefill_result is not None:
                problem = f"this is no decode worker, it is {self.role}: it receives no KV"
                raise InvalidRequest("prefill_result", problem)
            return KeepKv() if self.only_prefills and not request.is_probe else None
        if request.is_probe and request.prefill_result is None:
            return None
        given = (request.prefill_result or {}).get("disaggregated_params")
        if given is None:
            return self._local_prefill("missing")
        assert self._seal is not None
        opened = self._seal.open(given)
        try:
            found = params.read(opened.body, request.token_ids, selection, request.beside_model or None)
        except params.OtherVersion as error:
            if not self.counts["version"]:
                logger.warning("prompts of a prefill worker of another version are computed here: %s", error)
            return self._local_prefill("version")
        return self._local_prefill("late") if opened.is_late else ReadKv(found.kv, found.num_cached_tokens)

    def _local_prefill(self, reason: str) -> LocalPrefill:
        if not self._max_local:
            what = "of another version" if reason == "version" else reason
            problem = f"is {what}, and this decode worker computes no prompts (--max-local-prefills 0)"
            raise InvalidRequest(KV_TRANSFER_FIELD, problem)
        return LocalPrefill(reason)

    def check_local_prefills(self, kv: KvPart | None) -> None:
        """Raises `Overloaded` if ``kv`` is a local prefill, and there are too many."""
        if isinstance(kv, LocalPrefill) and len(self._local) >= self._max_local:
            raise Overloaded(
                f"{self._max_local} prompts without a KV transfer are being computed here already "
                "(--max-local-prefills)"
            )

    def admit(self, admitted: InFlightRequest, kv: KvPart | None) -> None:
        """Count a local prefill until `release` or `release_id`; nothing for other requests."""
        if isinstance(kv, LocalPrefill):
            self._local[admitted.request_id] = admitted
            self.counts[kv.reason] += 1

    def release(self, admitted: InFlightRequest) -> None:
        """The local prefill is done, or its request has ended. Idempotent."""
        if self._local.get(admitted.request_id) is admitted:
            self.release_id(admitted.request_id)

    def release_id(self, request_id: str) -> None:
        """The request with this id, if there is one, has ended."""
        self._local.pop(request_id, None)

    def transfer_params(
        self, prompt: Sequence[int], selection: Selection, delta: TokenDelta, adapter: str | None = None
    ) -> dict[str, Any]:
        """The sealed ``disaggregated_params`` of a prefill worker's only chunk.

        Args:
            prompt: Token ids.
            selection: The request's processors.
            delta: Last delta of the engine, with the handle of the KV.
            adapter: `GenerationRequest.beside_model`, None for the model alone.
        """
        assert delta.kv is not None
        assert self._seal is not None
        written = params.write(prompt, selection, delta.kv, delta.num_cached_tokens, adapter)
        return self._seal.close(written, self._lease_s)


class TransferMetrics:
    """Metrics of an engine's KV transfers, read from it whenever they are collected.

    Args:
        engine: The engine.
        disaggregation: Role of the same worker.
        registry: Registry of the metrics.
    """

    def __init__(
        self, engine: ServingEngine, disaggregation: DisaggregatedServing, registry: CollectorRegistry
    ) -> None:
        self._engine = engine
        self._disaggregation = disaggregation
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        found: Mapping[str, float] = self._engine.transfers()
        transfers = CounterMetricFamily("dlw_kv_transfers", "KV transfers by outcome.", labels=["outcome"])
        for outcome in OUTCOMES:
            transfers.add_metric([outcome], found.get(outcome, 0))
        yield transfers
        local = CounterMetricFamily(
            "dlw_local_prefills", "Prompts that a decode worker computed itself, by reason.", labels=["reason"]
        )
        for reason in LOCAL_REASONS:
            local.add_metric([reason], self._disaggregation.counts[reason] + found.get(reason, 0))
        yield local
        received = "KV that was read from prefill workers"
        yield CounterMetricFamily("dlw_kv_received_bytes", f"{received}, bytes.", value=found.get("bytes", 0))
        seconds = found.get("seconds", 0.0)
        yield CounterMetricFamily("dlw_kv_received_seconds", f"{received}, seconds from start to end.", value=seconds)
        leased = self._engine.num_leased()
        yield GaugeMetricFamily("dlw_kv_leased_prompts", "Prompts whose KV is leased to decode workers.", value=leased)
