"""Disaggregated serving, as far as a request sees it: which part of it this worker does, and what it hands over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from adapters.selection import Selection
from worker.engines import Engine, KeepKv, ReadKv, TokenDelta
from worker.engines.embedded import handoff
from worker.errors import InvalidRequest
from worker.request import GenerationRequest

Role = Literal["aggregated", "prefill", "decode"]

OUTCOMES = ("held", "taken", "timed_out", "received", "known", "expired", "lost", "cancelled")
"""What becomes of a hand-off, as in `worker.engines.embedded.exchange.Exchange.counts`."""


def part_of(role: str, request: GenerationRequest, selection: Selection) -> tuple[KeepKv | ReadKv | None, int]:
    """What the engine is to do with the prompt's KV, and how many tokens of it the prefill worker had already.

    A health probe is served by a decode worker alone, and held by no prefill worker.

    Raises:
        InvalidRequest: the hand-off is missing, foreign or not for this worker.
    """
    if role != "decode":
        if request.prefill_result is not None:
            raise InvalidRequest("prefill_result", f"this is no decode worker, it is {role}: it takes no hand-off")
        return (KeepKv() if role == "prefill" and not request.is_probe else None), 0
    if request.is_probe and request.prefill_result is None:
        return None, 0
    given = (request.prefill_result or {}).get("disaggregated_params")
    found = handoff.read(given, request.prompt_token_ids, selection)
    return ReadKv(found.kv), found.num_cached_tokens


def hand_over(prompt: Sequence[int], selection: Selection, delta: TokenDelta) -> dict[str, Any]:
    """The ``disaggregated_params`` of the only chunk of a prefill worker, whose engine said `delta`."""
    assert delta.kv is not None
    return handoff.write(prompt, selection, delta.kv, delta.num_cached_tokens)


class TransferMetrics:
    """Hand-offs of an engine, read from it whenever metrics are collected.

    Args:
        engine: The engine.
        registry: Where the metrics go.
    """

    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        self._engine = engine
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; `prometheus_client` calls it."""
        found: Mapping[str, float] = self._engine.transfers()
        handed = CounterMetricFamily("dlw_kv_handoffs", "Hand-offs of KV by what became of them.", labels=["outcome"])
        for outcome in OUTCOMES:
            handed.add_metric([outcome], found.get(outcome, 0))
        yield handed
        received = "KV that was read from prefill workers"
        yield CounterMetricFamily("dlw_kv_received_bytes", f"{received}, bytes.", value=found.get("bytes", 0))
        seconds = found.get("seconds", 0.0)
        yield CounterMetricFamily("dlw_kv_received_seconds", f"{received}, seconds from start to end.", value=seconds)
        if "used_blocks" in found:
            used = "Blocks of the KV store that requests own: in flight, being received, or held."
            yield GaugeMetricFamily("dlw_kv_used_blocks", used, value=found["used_blocks"])
        held = self._engine.num_held()
        yield GaugeMetricFamily("dlw_kv_held_prompts", "Prompts whose KV is held for decode workers.", value=held)
