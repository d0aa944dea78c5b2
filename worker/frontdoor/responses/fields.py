"""Fields of Responses requests with their fate; the fates are those of `worker.frontdoor.fields`.

Fields that Responses and chat have in common under one name, and those that chat has beside
OpenAI's, go on to the chat request as they are: their rows are chat's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.frontdoor import field_types
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body, Check
from worker.frontdoor.fields import CHAT, TABLES, ClientField
from worker.frontdoor.responses import checks
from worker.frontdoor.responses.kinds import LOGPROBS
from worker.frontdoor.values import printable
from worker.requests.fields import Fate

RESPONSES = "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"

_ONE = (RESPONSES,)
_BOTH = (RESPONSES, INPUT_TOKENS)


def _row(name: str, fate: Fate, why: str, check: Check | None = None, paths: tuple[str, ...] = _ONE) -> ClientField:
    return ClientField(name, paths, fate, why, check=check)


def _refused(name: str, why: str, *neutral: Any, paths: tuple[str, ...] = _ONE) -> ClientField:
    return ClientField(name, paths, "refused", why, neutral)


OWN: tuple[ClientField, ...] = (
    _row(
        "model",
        "frontend",
        "Which model answers; a name that is not served is a 404.",
        field_types.text("model"),
        _BOTH,
    ),
    _row("input", "honoured", "The prompt: a text, or the items below.", paths=_BOTH),
    _row(
        "instructions",
        "honoured",
        "A system message before the input. Those of a previous response do not carry over.",
        field_types.text("instructions"),
        _BOTH,
    ),
    _row(
        "previous_response_id",
        "honoured",
        "The input of a stored response and its output come before the input.",
        field_types.text("previous_response_id"),
        _BOTH,
    ),
    _row(
        "max_output_tokens",
        "honoured",
        "Tokens to generate at most, those of reasoning included.",
        field_types.count("max_output_tokens", 1),
    ),
    _row("include", "honoured", f"Values are below; {LOGPROBS} reports log probabilities.", checks.include),
    _row(
        "top_logprobs",
        "honoured",
        f"Alternatives per token, up to 20, or 100 before OpenEngine workers. Refused without {LOGPROBS} in include.",
        checks.top_logprobs,
    ),
    _row("text", "honoured", "format is below. Refused: verbosity, unless it is medium.", checks.text_config, _BOTH),
    _row("tools", "honoured", "Types are below.", paths=_BOTH),
    _row("tool_choice", "honoured", "Values are below.", paths=_BOTH),
    _row("parallel_tool_calls", "honoured", "As in chat.", field_types.truth("parallel_tool_calls"), _BOTH),
    _row("max_tool_calls", "no effect", "Concerns built-in tools alone.", field_types.count("max_tool_calls", 1)),
    _row(
        "reasoning",
        "honoured",
        "effort goes to the chat template; summary auto has no effect. Refused: summary concise and detailed, context "
        "but auto, mode but standard.",
        checks.reasoning,
        _BOTH,
    ),
    _row("stream", "honoured", "Server-sent events.", field_types.truth("stream")),
    _row("stream_options", "honoured", "Refused: include_obfuscation, and unknown keys.", checks.stream_options),
    _row(
        "store",
        "honoured",
        "Whether the response can be fetched and continued later; true by default, unless the store is off.",
        field_types.truth("store"),
    ),
    _row(
        "background",
        "honoured",
        "The answer is the response as it begins; it is fetched, or cancelled, by its id.",
        checks.background,
    ),
    _row(
        "background_options",
        "honoured",
        "Refused: a completion_window but soonest, and continuation_id.",
        checks.background_options,
    ),
    _row("metadata", "honoured", "Kept with the response.", checks.metadata),
    _row("user", "no effect", "Says who asks.", field_types.text("user")),
    _row("safety_identifier", "no effect", "Says who asks.", field_types.text("safety_identifier")),
    _row(
        "prompt_cache_key",
        "no effect",
        "A hint: the prefix cache finds equal beginnings by itself.",
        field_types.text("prompt_cache_key"),
    ),
    _row("client_metadata", "no effect", "Says which program asks.", field_types.an_object("client_metadata")),
    _refused("conversation", "there are no conversations; use previous_response_id", "", {}, paths=_BOTH),
    _refused("truncation", "inputs are not cut", "disabled", paths=_BOTH),
    _refused("personality", "is not supported", "", paths=(INPUT_TOKENS,)),
    _refused("prompt", "there are no stored prompts; use instructions and input", {}),
    _refused("service_tier", "there is one tier", "auto", "default"),
    _refused("prompt_cache_options", "the prefix cache has no options", {}),
    _refused("prompt_cache_retention", "the prefix cache keeps nothing for a stated time"),
    _refused("context_management", "contexts are not compacted here", []),
    _refused("moderation", "there is no moderation", {}),
    _refused(
        "image",
        "the model's own processor sizes pictures",
        {},
        {"context_compression": "auto"},
        {"context_compression": "disabled"},
    ),
    _refused("access_programs", "there are no access programs", []),
)
"""The fields of OpenAI's requests, and of those of its programs."""

INSTEAD: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include with {LOGPROBS}",
}
"""Fields of chat that Responses has by another name."""

ABSENT = ("n", "prediction", "functions", "function_call", "modalities", "audio", "verbosity", "web_search_options")
"""Further fields of OpenAI's chat that Responses does not have."""


def passed_on() -> Mapping[str, ClientField]:
    """The fields of chat that are fields of Responses too, under the same name, and go on as they
    are.
    """
    own = {row.name for row in OWN}
    return {name: row for name, row in TABLES[CHAT].items() if name not in (*own, *INSTEAD, *ABSENT)}


PASSED_ON = passed_on()


def check_fields(path: str, fields: Body) -> None:
    """Refuse fields and values that cannot be kept.

    Args:
        path: `RESPONSES` or `INPUT_TOKENS`.
        fields: The client's request.

    Raises:
        FieldRefused: naming the first of them.
    """
    table = {row.name: row for row in OWN if path in row.paths}
    for name, value in fields.items():
        row = table.get(name)
        if row is None and name in PASSED_ON:
            continue
        if row is None:
            hint = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
            raise FieldRefused(printable(name), f"is not a field of {path}{hint}", code="unknown_parameter")
        if row.fate == "refused" and not row.asks_for_nothing(value):
            raise FieldRefused(name, row.why, code="unsupported_parameter")
        if row.check is not None and value is not None:
            row.check(value, fields)
