"""Checks of values of a Responses request, each of which names the path of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.field_types import count, is_one_of, truth
from worker.frontdoor.responses.kinds import FORMATS, INCLUDES, LOGPROBS, kind_at
from worker.frontdoor.values import shown

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning.effort``: those that Dynamo's frontend knows."""


def refuse_unless(path: str, value: Any, neutral: Sequence[Any], why: str) -> None:
    """Raise `FieldRefused` for a value that is neither null nor one of ``neutral``."""
    if not is_one_of(value, neutral):
        raise FieldRefused(path, why, code="unsupported_parameter")


def include(value: Any, body: Body) -> None:
    """Refuse a list of ``include`` with values that cannot be included."""
    for i, each in enumerate(values.list_of("include", value)):
        kind_at(f"include[{i}]", each, INCLUDES)


def top_logprobs(value: Any, body: Body) -> None:
    """Refuse alternatives of log probabilities that are not asked for."""
    count("top_logprobs", 0)(value, body)
    included = body.get("include")
    if value and LOGPROBS not in (included if isinstance(included, list) else ()):
        raise FieldRefused("top_logprobs", f"needs {LOGPROBS} in include")


def metadata(value: Any, body: Body) -> None:
    """Refuse metadata that OpenAI's API refuses."""
    values.metadata(value)


def background(value: Any, body: Body) -> None:
    """Refuse a background response that is not stored: nothing could be asked about it."""
    truth("background")(value, body)
    if value and body.get("store") is False:
        raise FieldRefused("background", "needs store: true, because the response is fetched by its id")


def background_options(value: Any, body: Body) -> None:
    """Refuse all but a background response that begins at once."""
    given = values.object_within("background_options", value, ("completion_window", "continuation_id"))
    refuse_unless(
        "background_options.completion_window",
        given.get("completion_window"),
        ("soonest",),
        "background responses begin at once",
    )
    refuse_unless("background_options.continuation_id", given.get("continuation_id"), (), "is not supported")


def stream_options(value: Any, body: Body) -> None:
    """Refuse obfuscation, and unknown keys."""
    given = values.object_within("stream_options", value, ("include_obfuscation",))
    refuse_unless("stream_options.include_obfuscation", given.get("include_obfuscation"), (False,), "is not supported")


def reasoning(value: Any, body: Body) -> None:
    """Refuse settings of reasoning that would be lost."""
    given = values.object_within("reasoning", value, ("effort", "summary", "generate_summary", "context", "mode"))
    effort = given.get("effort")
    if effort is not None and effort not in EFFORTS:
        problem = f"must be one of {', '.join(EFFORTS)}, got {shown(effort)}"
        raise FieldRefused("reasoning.effort", problem)
    for key in ("summary", "generate_summary"):
        refuse_unless(
            f"reasoning.{key}", given.get(key), ("auto",), "reasoning items have their text, and no summary of it"
        )
    refuse_unless(
        "reasoning.context", given.get("context"), ("auto",), "the chat template decides which reasoning it shows"
    )
    refuse_unless("reasoning.mode", given.get("mode"), ("standard",), "there is one mode")


def text_config(value: Any, body: Body) -> None:
    """Refuse a ``text`` whose format or verbosity would be lost."""
    given = values.object_within("text", value, ("format", "verbosity"))
    refuse_unless("text.verbosity", given.get("verbosity"), ("medium",), "is not supported")
    wanted = given.get("format")
    if wanted is None:
        return
    kind = kind_at("text.format.type", values.object_of("text.format", wanted).get("type"), FORMATS)
    values.keys_within("text.format", wanted, kind.keys)
    if kind.name == "json_schema":
        values.text("text.format.name", wanted.get("name"))
        if not isinstance(wanted.get("schema"), dict):
            raise FieldRefused("text.format.schema", "must be a JSON Schema")
