"""The object ``response`` of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from worker.frontdoor.errors import Refused
from worker.frontdoor.field_checks import Body

Response = dict[str, Any]

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "temperature",
    "top_p",
    "user",
)
"""Fields of a request that its response repeats as they are, null if they are absent."""

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


def new_response(fields: Body, response_id: str, *, stored: bool) -> Response:
    """The response to a checked request, before its answer has begun.

    Args:
        fields: The request.
        response_id: Id of the response.
        stored: Whether the response will be stored.
    """
    background = fields.get("background") is True
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if background else "in_progress",
        "background": background,
        "error": None,
        "incomplete_details": None,
        "model": fields["model"],
        "output": [],
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "reasoning": _reasoning(fields.get("reasoning") or {}),
        "service_tier": "default",
        "store": stored,
        "text": {"format": (fields.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in fields.get("tools") or ()],
        "top_logprobs": fields.get("top_logprobs") or 0,
        "truncation": "disabled",
        "usage": None,
        **{name: fields.get(name) for name in _ECHOED},
    }


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"effort": given.get("effort"), "summary": given.get("summary") or given.get("generate_summary")}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}


def usage_of(usage: Mapping[str, Any], reasoning_tokens: int = 0) -> dict[str, Any]:
    """The usage of a chat as that of a response.

    Args:
        usage: ``usage`` of a chunk.
        reasoning_tokens: Tokens of the reasoning, for a worker that does not count them.
    """
    prompt = usage.get("prompt_tokens_details") or {}
    told = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens if told is None else told},
        "total_tokens": usage["total_tokens"],
    }


def error_of(refused: Refused) -> dict[str, Any]:
    """The ``error`` of a response that has failed."""
    error: dict[str, Any] = {"code": _ERROR_CODES.get(refused.status, "server_error"), "message": refused.message}
    return error if refused.param is None else {**error, "param": refused.param}
