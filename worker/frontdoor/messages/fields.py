"""Fields of requests to Anthropic's Messages API, with their fate.

*Honoured*: the answer follows it. *Frontend*: Dynamo's frontend acts on it. *No effect*: by nature;
it changes no token. *Refused*: a 400 that names it, unless its value asks for nothing.
`docs/messages.md` has this table for clients, and a test compares the two. Controls that are not
Anthropic's have the names, and the rows, of chats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.fields import CHAT, TABLES, ClientField
from worker.frontdoor.routes import COUNT_TOKENS, MESSAGES
from worker.frontdoor.values import printable
from worker.requests.fields import Fate
from worker.sampling import SamplingParams, sampling_controls

_BOTH = (MESSAGES, COUNT_TOKENS)
_ANSWER = (MESSAGES,)
_CODES = {"thread": "thread_unsupported_request"}
"""Codes of refusals on which Anthropic's client goes on without the field."""

_KEEPS_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
"""Edit of the context that removes nothing; coding agents send it."""
_HEADER = "Clients send it as a header, which is accepted and changes nothing."


def _row(name: str, paths: tuple[str, ...], fate: Fate, why: str) -> ClientField:
    return ClientField(name, paths, fate, why)


def _refused(name: str, paths: tuple[str, ...], why: str, *neutral: Any) -> ClientField:
    return ClientField(name, paths, "refused", why, neutral)


_OWN: tuple[ClientField, ...] = (
    _row("model", _BOTH, "honoured", "Which model answers; a name that is not served is a 404."),
    _row(
        "messages",
        _BOTH,
        "honoured",
        "The prompt, by the chat template. Roles user, assistant and system; blocks text, tool_use, tool_result, "
        "thinking and, of the user, image, with a source of type base64 or url. Refused: other blocks and sources, and "
        "pictures where the engine takes none.",
    ),
    _row("system", _BOTH, "honoured", "A text, or blocks of text, which are joined by line breaks."),
    _row(
        "max_tokens",
        _ANSWER,
        "honoured",
        "Tokens to generate at most, 1 or more. An answer that ends earlier with the context has the stop_reason "
        "model_context_window_exceeded.",
    ),
    _row("stream", _ANSWER, "honoured", "Server-sent events."),
    _row(
        "stop_sequences",
        _ANSWER,
        "honoured",
        "End the answer, in thoughts too; stop_sequence names the one. Refused: more than 4 with a frontend of 1.4.2, "
        "and beside ignore_eos.",
    ),
    _row(
        "tools",
        _BOTH,
        "honoured",
        "Custom tools with an input_schema, as the functions of a chat. Refused: tools of another type, which "
        "Anthropic's servers run or know, defer_loading, and callers other than direct.",
    ),
    _row(
        "tool_choice",
        _BOTH,
        "honoured",
        "auto, any, tool and none; disable_parallel_tool_use means at most one call.",
    ),
    _row(
        "thinking",
        _BOTH,
        "honoured",
        "enabled: budget_tokens runs as the processor thinking_budget, which is refused for a model without thinking "
        "tags; disabled, adaptive: the chat template's switch. display omitted leaves the text out. "
        "Refused: between_tools.",
    ),
    _row(
        "output_config",
        _BOTH,
        "honoured",
        "format is a JSON Schema that holds the answer; effort is for the chat template. Refused: task_budget.",
    ),
    _row("output_format", _BOTH, "honoured", "Earlier name of output_config.format."),
    _row("cache_control", _BOTH, "no effect", "A hint: the prefix cache finds equal beginnings by itself."),
    _row("metadata", _ANSWER, "no effect", "user_id says who asks."),
    _row("betas", _BOTH, "no effect", _HEADER),
    _row("user_profile_id", _BOTH, "no effect", _HEADER),
    _row("workspace_id", _BOTH, "no effect", _HEADER),
    _refused("service_tier", _ANSWER, "there is one tier", "auto", "standard_only"),
    _refused("speed", _BOTH, "there is one speed", "standard"),
    _refused("inference_geo", _ANSWER, "where this server stands is not known here", ""),
    _refused("container", _ANSWER, "there are no containers", ""),
    _refused("mcp_servers", _BOTH, "there is no client of MCP servers; offer their tools as tools", []),
    _refused(
        "context_management",
        _BOTH,
        "the context is what the messages say",
        {},
        {"edits": []},
        {"edits": [_KEEPS_THOUGHTS]},
    ),
    _refused("compaction", _BOTH, "the context is what the messages say", {}),
    _refused("thread", _ANSWER, "messages are not stored; clients then send all of them again", {}),
    _refused("diagnostics", _ANSWER, "messages are not stored", {}, {"previous_message_id": None}),
    _refused("billing_policy", _BOTH, "nothing is billed", {}),
    _refused("fallbacks", _ANSWER, "no other model answers in the place of one", []),
    _refused("fallback_credit_token", _ANSWER, "no other model answers in the place of one"),
)

_FOR_PROMPTS = ("chat_template_kwargs", "chat_template_args")
_OF_CHATS = (
    "logit_bias",
    "logits_processors",
    "nvext",
    "stop_token_ids",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
    "guided_decoding_backend",
    "skip_special_tokens",
    "cache_salt",
)


def _of_chats() -> tuple[ClientField, ...]:
    own = {row.name for row in _OWN}
    controls = [each.name for each in sampling_controls(SamplingParams) if each.is_client_field]
    names = [name for name in (*controls, *_OF_CHATS, *_FOR_PROMPTS) if name not in own]
    rows = [TABLES[CHAT][name] for name in names]
    return tuple(_row(row.name, _BOTH if row.name in _FOR_PROMPTS else _ANSWER, row.fate, row.why) for row in rows)


SENT_AS_THEY_ARE = _of_chats()
"""Fields that a chat has too, under the same name."""

FIELDS = (*_OWN, *SENT_AS_THEY_ARE)
TABLE: Mapping[str, Mapping[str, ClientField]] = {
    path: {row.name: row for row in FIELDS if path in row.paths} for path in _BOTH
}


def check(path: str, fields: Mapping[str, Any]) -> None:
    """Refuse unknown fields, and values that ask for what there is not.

    Args:
        path: `MESSAGES` or `COUNT_TOKENS`.
        fields: The request.

    Raises:
        FieldRefused: a field is to blame.
    """
    for name, value in fields.items():
        row = TABLE[path].get(name)
        if row is None:
            raise FieldRefused(printable(name), f"is not a field of {path}", code="unknown_parameter")
        if row.fate == "refused" and not row.asks_for_nothing(value):
            raise FieldRefused(name, row.why, code=_CODES.get(name, "unsupported_parameter"))
    required = ("model", "max_tokens", "messages") if path == MESSAGES else ("model", "messages")
    for name in required:
        if fields.get(name) is None:
            raise FieldRefused(name, "is required")
