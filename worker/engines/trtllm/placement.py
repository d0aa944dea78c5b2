"""Placement of requests among the ranks of attention data parallelism."""

from __future__ import annotations

import importlib
from typing import Any

from worker.engines import RequestHints
from worker.engines.trtllm.capabilities import Package
from worker.errors import InvalidRequest, StartupError

AFFINITY = "kv_cache_routing_conversation_affinity"
"""Key of TensorRT-LLM's ``attention_dp_config``: requests of a conversation stay on one rank."""


def num_dp_ranks(llm: Any) -> int:
    """Ranks that have a batch and a KV cache of their own: those of the tensor parallel group."""
    return int(llm.args.tensor_parallel_size) if llm.args.enable_attention_dp else 1


def keeps_conversations(llm: Any, package: Package) -> bool:
    """Whether TensorRT-LLM chooses the rank, by the conversation of a request.

    Raises:
        StartupError: it is told to, and the version takes no conversations.
    """
    config = getattr(llm.args, "attention_dp_config", None)
    if getattr(config, AFFINITY, False) is not True:
        return False
    if "conversation_params" not in package.generate_arguments:
        raise StartupError(f"{AFFINITY}: TensorRT-LLM {package.version} takes no conversations")
    return True


def placement(hints: RequestHints, num_ranks: int, *, keeps_conversations: bool) -> dict[str, Any]:
    """Arguments of ``generate_async`` for the rank of a request.

    The router's choice is strict: its own view of the ranks' caches and loads depends on it. A
    conversation comes first where TensorRT-LLM keeps them, which looks for one only where no rank
    is asked for.

    Args:
        hints: Hints of the request.
        num_ranks: Ranks of the engine; with one there is nothing to choose.
        keeps_conversations: Whether TensorRT-LLM chooses by conversations.

    Raises:
        InvalidRequest: the router chose a rank that this engine does not have.
    """
    if num_ranks == 1:
        return {}
    if keeps_conversations:
        if hints.conversation is None:
            return {}
        made = importlib.import_module("tensorrt_llm.conversation_params")
        return {"conversation_params": made.ConversationParams(conversation_id=hints.conversation)}
    if hints.dp_rank is None:
        return {}
    return on_rank(hints.dp_rank, num_ranks)


def on_rank(dp_rank: int, num_ranks: int) -> dict[str, Any]:
    """Arguments of ``generate_async`` for a request that runs on one rank and no other.

    Raises:
        InvalidRequest: there is no such rank.
    """
    if dp_rank >= num_ranks:
        raise InvalidRequest("routing.dp_rank", f"must be below {num_ranks}, the ranks of this engine, got {dp_rank}")
    if num_ranks == 1:
        return {}
    made = importlib.import_module("tensorrt_llm.scheduling_params")
    return {"scheduling_params": made.SchedulingParams(attention_dp_rank=dp_rank, attention_dp_relax=False)}
