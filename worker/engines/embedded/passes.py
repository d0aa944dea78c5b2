"""Counts of a step of the embedded engine, for planners."""

from __future__ import annotations

from collections.abc import Iterable

from worker.engines.embedded.plan import Plan, Request
from worker.engines.forward_pass import ForwardPass


def count_pass(plan: Plan, waiting: Iterable[Request]) -> ForwardPass:
    """The counts of a step, before its tokens are committed; its duration is not known yet, and 0.

    Args:
        plan: The step.
        waiting: Requests in the waiting queue.
    """
    preempted = [one for one in waiting if one.num_preemptions]
    new = [one for one in waiting if not one.num_preemptions]
    return ForwardPass(
        num_prefill=len({id(chunk.request) for chunk in plan.chunks}),
        prefill_tokens=sum(chunk.stop - chunk.start for chunk in plan.chunks),
        prefill_kv_tokens=sum(chunk.start for chunk in plan.chunks),
        num_decode=len(plan.decode),
        decode_kv_tokens=sum(len(one.tokens) for one in plan.decode),
        num_waiting_prefill=len(new),
        waiting_prefill_tokens=_num_tokens(new),
        num_waiting_decode=len(preempted),
        waiting_decode_tokens=_num_tokens(preempted),
        seconds=0.0,
    )


def _num_tokens(requests: Iterable[Request]) -> int:
    """Tokens of requests and their companions."""
    return sum(len(sequence.tokens) for request in requests for sequence in request.sequences)
