"""Reading of the calls in an answer: by the format of the models and the tools of the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapters.calls import FORMATS, CallFormat
from adapters.calls.xml_values import TAGS
from adapters.grammars.json_schema import MAX_WORK_OF_ALL, SchemaRefused, argument_kinds, limited
from worker.frontdoor.calls import CallParser, Kinds
from worker.frontdoor.field_checks import Body
from worker.frontdoor.tool_choice import forces_call, with_allowed_tools
from worker.frontdoor.tool_stage import ToolStage
from worker.frontdoor.tools import ToolCallSettings, has_json_format


@dataclass(frozen=True, slots=True)
class ToolReading:
    """Reading of the calls in one answer.

    Attributes:
        spelling: Format of calls.
        tools: Types of the arguments, by the tool's name.
        only_calls: Whether the answer is calls alone.
        or_answer: Whether it is calls alone, or what ``response_format`` asks for.
        hidden: Texts of special tokens, which the client does not get.
        short_ids: Whether the chat template refuses other ids of calls than short ones.
    """

    spelling: CallFormat
    tools: Mapping[str, Kinds]
    only_calls: bool
    or_answer: bool
    hidden: frozenset[str]
    short_ids: bool

    def stage(self) -> ToolStage:
        """The stage for the chunks of one answer."""
        parser = partial(
            CallParser,
            self.spelling,
            self.tools,
            only_calls=self.only_calls,
            or_answer=self.or_answer,
            hidden=self.hidden,
        )
        return ToolStage(parser, short_ids=self.short_ids)


def needs_chunks(fields: Body, calls: ToolCallSettings | None, *, parses: bool) -> bool:
    """Whether the answer to a chat is made of chunks, rather than forwarded byte for byte.

    Args:
        fields: Fields of the client's request.
        calls: Format in which the models write calls, None if it is not known.
        parses: Whether the frontend would look for calls in whole answers without tools.
    """
    if not isinstance(fields.get("stream"), bool | None):
        return False  # the frontend refuses it
    if fields.get("tools") and fields.get("tool_choice") != "none":
        return bool(_functions(fields, calls))
    return parses and not fields.get("stream")


def tool_reading(fields: Body, calls: ToolCallSettings | None) -> ToolReading | None:
    """Reading of the calls in the answer to a request; None if the front door reads none.

    Args:
        fields: Fields of the client's request.
        calls: Format in which the models write calls, None if it is not known.

    Raises:
        FieldRefused: ``tool_choice`` allows tools that there are not.
    """
    functions = _functions(fields, calls)
    if calls is None or not functions:
        return None
    spelling = FORMATS[calls.name]
    with limited(MAX_WORK_OF_ALL):
        kinds = {function["name"]: _kinds(function.get("parameters"), spelling) for function in functions}
    hidden = frozenset[str]() if fields.get("skip_special_tokens") is False else calls.special_tokens
    short_ids = calls.support is not None and calls.support.short_ids
    only_calls = forces_call(fields)
    return ToolReading(spelling, kinds, only_calls, has_json_format(fields) and not only_calls, hidden, short_ids)


def reads_schemas(fields: Body, calls: ToolCallSettings | None) -> bool:
    """Whether `tool_reading` reads the schemas of the tools, which may take a second."""
    return calls is not None and FORMATS[calls.name].arguments in TAGS and bool(fields.get("tools"))


def _functions(fields: Body, calls: ToolCallSettings | None) -> list[Body]:
    """The functions whose calls are read in the answer; raises as `tool_reading`."""
    if calls is None or not isinstance(fields.get("tools"), list) or fields.get("tool_choice") == "none":
        return []
    tools = with_allowed_tools(fields)["tools"]
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return [each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]


def _kinds(schema: Any, spelling: CallFormat) -> Kinds:
    if spelling.arguments not in TAGS or not isinstance(schema, dict):
        return {}
    try:
        return argument_kinds({**schema, "type": "object"})
    except SchemaRefused:  # so will be the request
        return {}
