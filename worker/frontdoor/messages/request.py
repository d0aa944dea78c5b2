"""A request in Anthropic's form as a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import is_before_1_6
from worker.frontdoor.messages import fields as table
from worker.frontdoor.messages.chat_paths import ChatPaths
from worker.frontdoor.messages.conversation import Conversation, conversation
from worker.frontdoor.messages.fields import SENT_AS_THEY_ARE
from worker.frontdoor.messages.thinking import thinking_of
from worker.frontdoor.messages.tools import add_tools
from worker.frontdoor.nvext import with_annotations, with_engine_data
from worker.frontdoor.routes import COUNT_TOKENS, MESSAGES
from worker.frontdoor.values import Object
from worker.requests.request import RETURN_TOKEN_IDS

EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Values of ``output_config.effort``."""

_FORMAT_NAME = "answer"


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A chat, and what of the request its answer depends on.

    Attributes:
        chat: Fields of the chat.
        paths: Names of the request's fields for the chat's.
        streams: Whether the answer is streamed.
        max_tokens: Limit of the answer; 0 where nothing is generated.
        stop_sequences: Texts that end the answer.
        shows_thoughts: Whether thinking blocks have their text.
        asks_for_match: Whether the worker is asked what ended the answer.
    """

    chat: Object
    paths: ChatPaths
    streams: bool = False
    max_tokens: int = 0
    stop_sequences: tuple[str, ...] = ()
    shows_thoughts: bool = True
    asks_for_match: bool = False


def translated(fields: Object, *, models_think: bool = False) -> TranslatedRequest:
    """The chat for a request to `MESSAGES`.

    Args:
        fields: The request.
        models_think: Whether the models are known to write thinking sections.

    Raises:
        FieldRefused: a field is unknown, malformed, or asks for what there is not.
    """
    table.check(MESSAGES, fields)
    streams = values.truth("stream", fields.get("stream"))
    max_tokens = values.integer("max_tokens", fields["max_tokens"], 1)
    stops = _stop_sequences(fields)
    _check_metadata(fields.get("metadata"))
    chat, paths, shows_thoughts = _chat(fields, max_tokens, models_think)
    chat["max_tokens"] = max_tokens
    if streams:
        # the first event has the input tokens
        chat["stream_options"] = {"continuous_usage_stats": True}
    if stops:
        # the text then tells which of them ended the answer
        chat |= {"stop": list(stops), "include_stop_str_in_output": True}
    asks_for_match = bool(stops and chat.get("min_tokens"))
    if asks_for_match:
        # the text may end with a stop sequence that came too early to end the answer
        chat["nvext"] = with_engine_data(with_annotations(chat.get("nvext"), RETURN_TOKEN_IDS))
    return TranslatedRequest(chat, paths, streams, max_tokens, stops, shows_thoughts, asks_for_match)


def counted(fields: Object, *, models_think: bool = False) -> TranslatedRequest:
    """The chat whose prompt a request to `COUNT_TOKENS` asks about; see `translated`.

    Raises:
        FieldRefused: a field is unknown, malformed, or asks for what there is not.
    """
    table.check(COUNT_TOKENS, fields)
    chat, paths, _ = _chat(fields, None, models_think)
    return TranslatedRequest(chat, paths)


def _chat(fields: Object, max_tokens: int | None, models_think: bool) -> tuple[Object, ChatPaths, bool]:
    found = conversation(fields)
    chat: Object = {"model": values.text("model", fields["model"]), "messages": found.messages}
    chat |= {row.name: fields[row.name] for row in SENT_AS_THEY_ARE if fields.get(row.name) is not None}
    if fields.get("cache_control") is not None:
        values.object_of("cache_control", fields["cache_control"])
    _continue(found, chat)
    add_tools(fields, chat)
    format_path = _add_output_config(fields, chat)
    thinking = thinking_of(fields.get("thinking"), max_tokens, models_think=models_think)
    thinking.add_to(chat)
    paths = ChatPaths(found.paths, found.pictures, format_path, thinking.budget is not None)
    return chat, paths, thinking.is_shown


def _continue(found: Conversation, chat: Object) -> None:
    """Ask for an answer that continues the last message, if it is the assistant's."""
    if not found.continues:
        return
    if is_before_1_6():
        raise FieldRefused(
            f"{found.paths[-1]}.role",
            "must not be assistant for the last message: Dynamo's frontend before 1.6 cannot continue it",
        )
    chat |= {"continue_final_message": True, "add_generation_prompt": False}


def _stop_sequences(fields: Object) -> tuple[str, ...]:
    given = fields.get("stop_sequences")
    if given is None:
        return ()
    found = values.list_of("stop_sequences", given)
    for i, each in enumerate(found):
        if not values.text(f"stop_sequences[{i}]", each):
            raise FieldRefused(f"stop_sequences[{i}]", "must not be empty")
    if found and fields.get("stop_token_ids"):
        raise FieldRefused("stop_token_ids", "cannot be given beside stop_sequences; the answer would show the token")
    return tuple(found)


def _check_metadata(given: Any) -> None:
    if given is None:
        return
    metadata = values.object_within("metadata", given, ("user_id",))
    if metadata.get("user_id") is not None:
        values.text("metadata.user_id", metadata["user_id"])


def _add_output_config(fields: Object, chat: Object) -> str | None:
    """Set ``response_format`` and ``reasoning_effort``; returns the path of the format, if any."""
    given = fields.get("output_config")
    config = {} if given is None else values.object_of("output_config", given)
    values.keys_within("output_config", config, ("effort", "format", "task_budget"))
    if config.get("task_budget") is not None:
        raise FieldRefused("output_config.task_budget", "there is no budget across requests")
    if config.get("effort") is not None:
        chat["reasoning_effort"] = values.one_of("output_config.effort", config["effort"], EFFORTS)
    path, wanted = "output_config.format", config.get("format")
    earlier = fields.get("output_format")
    if earlier is not None and wanted is not None:
        raise FieldRefused("output_format", "cannot be given beside output_config.format")
    if earlier is not None:
        path, wanted = "output_format", earlier
    if wanted is None:
        return None
    format = values.object_of(path, wanted)
    values.one_of(f"{path}.type", format.get("type"), ("json_schema",))
    values.keys_within(path, format, ("type", "schema"))
    schema = values.object_of(f"{path}.schema", format.get("schema"))
    named = {"name": _FORMAT_NAME, "schema": schema, "strict": True}
    chat["response_format"] = {"type": "json_schema", "json_schema": named}
    return path
