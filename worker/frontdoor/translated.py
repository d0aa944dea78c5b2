"""Chats and completions that are not forwarded byte for byte: a handler translates the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.returned_tokens import asks_back

MOST_FORWARDED = 128
"""Prompts of one completion that Dynamo's frontend takes."""


def is_translated(path: str, fields: Mapping[str, Any]) -> bool:
    """Whether Dynamo's frontend would answer a request in another form than clients know, or not at
    all.

    Args:
        path: `CHAT` or `COMPLETIONS`.
        fields: The client's fields.
    """
    if asks_back(fields):
        return True
    if path == CHAT:
        return any(fields.get(name) is not None for name in ("prompt_logprobs", "prompt"))
    asks = any(fields.get(name) is not None for name in ("logprobs", "prompt_logprobs"))
    if has_several_prompts(path, fields):
        asks = asks or len(fields["prompt"]) > MOST_FORWARDED or _has_several_ids(fields) or _has_data(fields)
    return asks or bool(fields.get("echo")) or is_zero(fields.get("max_tokens"))


def _has_several_ids(fields: Mapping[str, Any]) -> bool:
    """Whether Dynamo's frontend 1.4.2 would give the chunks of each prompt an id of their own.

    Counts after each token are its alone, and each prompt's.
    """
    options = fields.get("stream_options")
    counts = isinstance(options, dict) and options.get("continuous_usage_stats")
    return bool(fields.get("stream")) and not counts


def _has_data(fields: Mapping[str, Any]) -> bool:
    """Whether an answer has data of the worker's, such as a receipt, of which Dynamo's frontend
    gives that of one prompt alone if the answer is not streamed.
    """
    chosen, nvext = fields.get("logits_processors"), fields.get("nvext")
    has_receipt = isinstance(chosen, dict) and bool(chosen.get("receipt"))
    return not fields.get("stream") and (has_receipt or bool(isinstance(nvext, dict) and nvext.get("extra_fields")))


def has_several_prompts(path: str, fields: Mapping[str, Any]) -> bool:
    """Whether it is a completion of several prompts, of which workers take one at a time."""
    prompt = fields.get("prompt")
    return path == COMPLETIONS and isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int


def is_zero(value: Any) -> bool:
    """Whether a value is the integer 0."""
    return type(value) is int and value == 0
