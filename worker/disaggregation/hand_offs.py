"""Disaggregated serving, as far as a request sees it: which part of it this worker does, and
what it hands over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from adapters.catalog import Selection
from worker.disaggregation.seal import SECRET, Seal
from worker.engines import KeepKv, ReadKv, ServingEngine, TokenDelta
from worker.engines.embedded.transfer import handle
from worker.errors import HAND_OFF_FIELD, ConfigurationError, InvalidRequest, Overloaded
from worker.lifecycle.drain import Flight
from worker.requests.request import GenerationRequest

Role = Literal["aggregated", "prefill", "decode"]

OUTCOMES = ("held", "taken", "timed_out", "received", "known", "expired", "lost", "cancelled")
"""What becomes of a hand-off, as in
`worker.engines.embedded.transfer.connector.Exchange.counts`.
"""

LOCAL_REASONS = ("missing", "late", "expired", "lost")
"""Why a decode worker computes a prompt itself: no hand-off came, or it came when the prefill
worker had given it up; that worker had let go of the KV meanwhile, or could not be read."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker does of a request.

    Attributes:
        kv: What its engine is to do with the prompt's KV.
        num_cached_tokens: How many tokens of the prompt the prefill worker had already.
        local_reason: Why a decode worker computes the prompt itself, None where it does not.
    """

    kv: KeepKv | ReadKv | None = None
    num_cached_tokens: int = 0
    local_reason: str | None = None


class HandOffs:
    """What a worker hands over, or takes. One event loop only.

    A decode worker without a hand-off that it can use computes the prompt itself: whatever became
    of the prefill worker, the client gets the same tokens. Only so many at a time, so that a decode
    worker stays one.

    Args:
        role: Of the worker.
        seal: Signs what is handed over; needed by prefill and decode workers.
        hold_s: How long a prefill worker keeps what it hands over, seconds.
        max_local_prefills: Prompts that a decode worker computes itself at a time at most.

    Attributes:
        counts: Prompts that were computed here for want of a hand-off, by reason.
    """

    def __init__(self, role: str, seal: Seal | None, hold_s: float, max_local_prefills: int) -> None:
        if role != "aggregated" and seal is None:
            raise ConfigurationError(f"--disaggregation-mode {role} needs {SECRET}")
        self._role = role
        self._seal = seal
        self._hold_s = hold_s
        self._max_local = max_local_prefills
        self._local: dict[str, Flight] = {}
        self.counts: Counter[str] = Counter()

    @property
    def num_local(self) -> int:
        """Prompts that are being computed here for want of a hand-off."""
        return len(self._local)

    def part_of(self, request: GenerationRequest, selection: Selection) -> Part:
        """This worker's part of a request.

        A health probe is served by a decode worker alone, and held by no prefill worker.

        Raises:
            InvalidRequest: the hand-off is a stranger's, made for another request, or not for this
                worker.
        """
        if self._role != "decode":
            if request.prefill_result is not None:
                problem = f"this is no decode worker, it is {self._role}: it takes no hand-off"
                raise InvalidRequest("prefill_result", problem)
            return Part(KeepKv() if self._role == "prefill" and not request.is_probe else None)
        if request.is_probe and request.prefill_result is None:
            return Part()
        given = (request.prefill_result or {}).get("disaggregated_params")
        if given is None:
            return self._local_part("missing")
        assert self._seal is not None
        opened = self._seal.open(given)
        found = handle.read(opened.body, request.prompt_token_ids, selection)
        return self._local_part("late") if opened.is_late else Part(ReadKv(found.kv), found.num_cached_tokens)

    def _local_part(self, reason: str) -> Part:
        if not self._max_local:
            problem = f"is {reason}, and this decode worker computes no prompts (--max-local-prefills 0)"
            raise InvalidRequest(HAND_OFF_FIELD, problem)
        return Part(local_reason=reason)

    def check_room(self, part: Part) -> None:
        """Raises `Overloaded` if no more prompts may be computed here for want of a hand-off,
        and `part` is to be.
        """
        if part.local_reason is not None and len(self._local) >= self._max_local:
            raise Overloaded(
                f"{self._max_local} prompts without a hand-off are being computed here already (--max-local-prefills)"
            )

    def enter(self, flight: Flight, part: Part) -> None:
        """Count a prompt that is computed here for want of a hand-off, until `leave` or `evict`."""
        if part.local_reason is not None:
            self._local[flight.request_id] = flight
            self.counts[part.local_reason] += 1

    def leave(self, flight: Flight) -> None:
        """The prompt has been computed, or its request has ended. Idempotent."""
        if self._local.get(flight.request_id) is flight:
            self.evict(flight.request_id)

    def evict(self, request_id: str) -> None:
        """The request with this id, if there is one, was aborted."""
        self._local.pop(request_id, None)

    def hand_over(self, prompt: Sequence[int], selection: Selection, delta: TokenDelta) -> dict[str, Any]:
        """The ``disaggregated_params`` of the only chunk of a prefill worker, whose engine said
        `delta`.
        """
        assert delta.kv is not None
        assert self._seal is not None
        written = handle.write(prompt, selection, delta.kv, delta.num_cached_tokens)
        return self._seal.close(written, self._hold_s)


class TransferMetrics:
    """Hand-offs of an engine, read from it whenever metrics are collected.

    Args:
        engine: The engine.
        hand_offs: Of the same worker.
        registry: Where the metrics go.
    """

    def __init__(self, engine: ServingEngine, hand_offs: HandOffs, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._hand_offs = hand_offs
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        found: Mapping[str, float] = self._engine.transfers()
        handed = CounterMetricFamily("dlw_kv_handoffs", "Hand-offs of KV by what became of them.", labels=["outcome"])
        for outcome in OUTCOMES:
            handed.add_metric([outcome], found.get(outcome, 0))
        yield handed
        local = CounterMetricFamily(
            "dlw_local_prefills", "Prompts that a decode worker computed itself, by reason.", labels=["reason"]
        )
        for reason in LOCAL_REASONS:
            local.add_metric([reason], self._hand_offs.counts[reason] + found.get(reason, 0))
        yield local
        received = "KV that was read from prefill workers"
        yield CounterMetricFamily("dlw_kv_received_bytes", f"{received}, bytes.", value=found.get("bytes", 0))
        seconds = found.get("seconds", 0.0)
        yield CounterMetricFamily("dlw_kv_received_seconds", f"{received}, seconds from start to end.", value=seconds)
        if "used_blocks" in found:
            used = "Blocks of the KV store that requests own: in flight, being received, or held."
            yield GaugeMetricFamily("dlw_kv_used_blocks", used, value=found["used_blocks"])
        held = self._engine.num_held()
        yield GaugeMetricFamily("dlw_kv_held_prompts", "Prompts whose KV is held for decode workers.", value=held)
