"""`ForwardPass`: what one step of an engine computed, for planners that scale a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Requests and tokens of one step, and of the waiting queue while it was computed.

    The counts are those of Dynamo's ``ForwardPassMetrics``, version 1.

    Attributes:
        num_prefill: Requests of which a chunk of the prompt was computed.
        prefill_tokens: Tokens of these chunks.
        prefill_kv_tokens: Tokens before these chunks, whose KV was read: prefix hits and chunks of
            earlier steps.
        num_decode: Requests whose newest token was computed.
        decode_kv_tokens: Tokens of these requests, prompt and answer.
        num_waiting_prefill: Waiting requests that have not run.
        waiting_prefill_tokens: Tokens of their prompts.
        num_waiting_decode: Waiting requests that were preempted.
        waiting_decode_tokens: Tokens of these, prompt and answer.
        seconds: Duration of the step: planning, forward pass, sampling.
        dp_rank: Data parallel rank that computed it.
    """

    num_prefill: int
    prefill_tokens: int
    prefill_kv_tokens: int
    num_decode: int
    decode_kv_tokens: int
    num_waiting_prefill: int
    waiting_prefill_tokens: int
    num_waiting_decode: int
    waiting_decode_tokens: int
    seconds: float
    dp_rank: int = 0


ForwardPassSink = Callable[[ForwardPass], None]
"""Receiver of forward passes; called by the engine's own thread after each step; must not block."""


@runtime_checkable
class ReportsForwardPasses(Protocol):
    """An engine that can say what each of its steps computed."""

    def report_forward_passes(self, sink: ForwardPassSink) -> None:
        """Tell `sink` of every step from now on; once."""
