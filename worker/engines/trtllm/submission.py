"""The submission of a request beside its ``SamplingParams``: checks, and arguments of
``generate_async``.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from adapters.chain import ProcessorChain
from worker.engines import EngineRequest, TokenLogprob
from worker.engines.trtllm.capabilities import Package
from worker.engines.trtllm.deltas import entries_of
from worker.engines.trtllm.disaggregated_params import FIELD
from worker.errors import InvalidRequest

_MIN_DISAGG_ID = 2**42
"""Lower ids are TensorRT-LLM's own."""

_DUMMY_TOKEN = 1
"""The prompt of TensorRT-LLM's dummy requests, without a salt, by which ranks of attention data
parallelism that have no request keep in step. A request that shares their KV ends its rank.
"""

_NO_DUMMY = "no-dummy-request"
"""Salt of requests with the prompt of a dummy request."""


def own_arguments(request: EngineRequest, package: Package, num_dp_ranks: int = 1) -> dict[str, Any]:
    """Arguments of ``generate_async`` for the cache salt, trace headers and priority.

    TensorRT-LLM's priorities lie between 0 and 1, 0.5 is usual; those of requests are numbers
    around 0. Hints are left out where the version does not take them.

    Args:
        request: The request.
        package: The installed package.
        num_dp_ranks: Ranks of attention data parallelism.

    Raises:
        InvalidRequest: the request has a cache salt, and the version takes none.
    """
    hints = request.hints
    found: dict[str, Any] = {}
    if hints.trace_headers:
        found["trace_headers"] = dict(hints.trace_headers)
    if hints.priority:
        found["priority"] = 0.5 * (1 + hints.priority / (1 + abs(hints.priority)))
    taken = {name: value for name, value in found.items() if name in package.generate_arguments}
    if request.cache_salt is not None:
        if "cache_salt" not in package.generate_arguments:
            raise InvalidRequest("routing.cache_salt", "this version of TensorRT-LLM does not support cache salts")
        taken["cache_salt"] = request.cache_salt
    elif num_dp_ranks > 1 and set(request.token_ids) == {_DUMMY_TOKEN} and "cache_salt" in package.generate_arguments:
        taken["cache_salt"] = _NO_DUMMY
    return taken


def context_only(package: Package) -> Any:
    """``DisaggregatedParams`` of a prefill, with an id of its own where the version has one."""
    cls, ids = package.disaggregated_params, {}
    if "disagg_request_id" in {field.name for field in dataclasses.fields(cls)}:
        ids["disagg_request_id"] = _MIN_DISAGG_ID + secrets.randbelow(2**63 - _MIN_DISAGG_ID)
    return cls(request_type="context_only", **ids)


def check_hand_over(chain: ProcessorChain | None) -> None:
    """Refuse processors that need more of the other worker than its token: it samples the first one
    on the logits that it has, and is not told how long the answer may become.

    Args:
        chain: Processors of a request in disaggregated serving, None without any.

    Raises:
        InvalidRequest: one of them does; it is named.
    """
    members = [] if chain is None else chain.members
    reasons = {
        "keeps a state that is made of logits": [one.name for one in members if one.processor.observes_logits],
        "counts down to max_tokens": [one.name for one in members if one.processor.counts_down],
    }
    for reason, names in reasons.items():
        if names:
            problem = f"holds {', '.join(names)}, which {reason}, and TensorRT-LLM samples the first token on the "
            problem += "prefill worker; use aggregated workers, or the embedded engine"
            raise InvalidRequest("sampling_params.logits_processor", problem)


def handed_logprobs(hand_off: Mapping[str, Any]) -> list[TokenLogprob] | None:
    """Log probabilities of the token that prefill's chain sampled, None if it reported none.

    Raises:
        InvalidRequest: they are malformed.
    """
    entries = hand_off.get("logprobs")
    if entries is None:
        return None
    try:
        return entries_of([(int(token), float(value), int(rank)) for token, value, rank in entries])
    except (TypeError, ValueError):
        raise InvalidRequest(f"{FIELD}.logprobs", "is malformed") from None
