"""Tools and structured answers of a chat as logits processors.

Dynamo's frontend gives ``tools`` to the chat template and looks for calls in the finished text;
only a call that ``tool_choice`` forces is held to its schema, as JSON in place of the model's own
format. Where the front door is told in which format the model writes calls, every call is held to
the name of a tool and to the schema of its parameters, by the processor ``tool_calls``, and
`ToolStage` parses what comes out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from adapters.calls import FORMATS
from adapters.calls.detection import ToolSupport
from adapters.client import from_openai_tools, processor
from adapters.contract import Scope
from adapters.processors.structural import format_of
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.field_processors import FieldProcessor
from worker.frontdoor.tool_choice import forces_call, function_name, places_of


@dataclass(frozen=True, slots=True)
class ToolCallSettings:
    """Settings of the served models' tool calls: how they are written, and what else reads them.

    Attributes:
        name: Name of the format in `FORMATS`, ``format`` of the processor ``tool_calls``.
        scope: ``answer`` for models that think.
        frontend_parses: Whether Dynamo's frontend would parse calls too, since the workers have a
            parser of theirs.
        special_tokens: Texts of the model's special tokens, if calls are marked by such.
        support: Abilities of the chat template; None if it writes all tools, calls and results.
    """

    name: str
    scope: Scope = "all"
    frontend_parses: bool = False
    special_tokens: frozenset[str] = frozenset()
    support: ToolSupport | None = None


_OTHERWISE = (
    "or where the front door knows how the model writes calls: start it with --tool-call-format, or with the "
    "--model-path of the workers"
)


def check_without_format(fields: Body) -> None:
    """Refuse what only `tool_calls` could keep. Raises `FieldRefused`."""
    choice = fields.get("tool_choice")
    tools = fields.get("tools")
    if fields.get("parallel_tool_calls") is False and tools and choice != "none" and not isinstance(choice, dict):
        raise FieldRefused(
            "parallel_tool_calls", f"false is kept only with a tool_choice that names the function, {_OTHERWISE}"
        )
    for i, tool in enumerate(tools if isinstance(tools, list) and not forces_call(fields) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            raise FieldRefused(
                f"tools[{i}].function.strict",
                f'is kept only with a tool_choice that forces a call ("required" or a function), {_OTHERWISE}',
            )


def tools_as_processor(fields: Body, format: ToolCallSettings) -> FieldProcessor | None:
    """The processor that holds calls to ``tools``; None without tools, and where ``tool_choice`` is
    ``none`` beside a ``response_format`` of JSON, which is text whatever it holds.

    What the processor now does is taken out of ``fields``: a ``tool_choice`` that forces a call, in
    which place the frontend would put a JSON Schema, and a ``response_format``, which is that of an
    answer without calls.

    Raises:
        FieldRefused: the tools cannot be enforced.
    """
    tools = fields.get("tools")
    if not isinstance(tools, list) or not tools:
        return None
    choice = _or(fields.get("tool_choice"), "auto")
    # Who names a function wants one call of it, as clients that read a structure out of it do.
    parallel = _or(fields.get("parallel_tool_calls"), not isinstance(choice, dict))
    if not isinstance(choice, str | dict) or not isinstance(parallel, bool):
        return None  # the frontend refuses it
    _check_names(tools, choice)
    if choice == "none" and has_json_format(fields):
        return None
    try:
        made = from_openai_tools(
            tools, choice, format=format.name, parallel_tool_calls=parallel, **_scope(format), **_answer(fields, choice)
        )
    except ValueError as error:
        problem = str(error)
        raise FieldRefused("tool_choice" if problem.startswith("tool_choice") else "tools", problem) from None
    if choice != "none":
        _leave_calls_as_text(fields, format)
    return FieldProcessor(made, _client_path)


def _leave_calls_as_text(fields: Body, format: ToolCallSettings) -> None:
    """Have the frontend leave calls in the text, special tokens among them.

    A forced call would be a JSON Schema of its own to the frontend. ``none`` keeps it from parsing
    a stream, and the worker says that the template still gets the tools.
    """
    if format.frontend_parses:
        fields["tool_choice"] = "none"
    elif forces_call(fields):
        fields["tool_choice"] = "auto"
    if FORMATS[format.name].special or format.special_tokens:
        fields["skip_special_tokens"] = False


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _scope(format: ToolCallSettings) -> dict[str, Any]:
    return {} if format.scope == "all" else {"scope": format.scope}


def _check_names(tools: list[Any], choice: str | dict[str, Any]) -> None:
    places = places_of(tools)
    if isinstance(choice, dict) and function_name(choice) not in places:
        raise FieldRefused("tool_choice.function.name", "is the name of none of the tools")


def take_moot_format(fields: Body) -> bool:
    """Take out a ``response_format`` of JSON beside a ``tool_choice`` that forces a call: it is of
    a text, and such an answer has none. Whether there was one.
    """
    is_moot = bool(fields.get("tools")) and forces_call(fields) and has_json_format(fields)
    if is_moot:
        del fields["response_format"]
    return is_moot


def has_json_format(fields: Body) -> bool:
    """Whether ``response_format`` asks for JSON."""
    wanted = fields.get("response_format")
    return isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema")


def _answer(fields: Body, choice: str | dict[str, Any]) -> dict[str, Any]:
    """The argument for what an answer without calls must be, taken out of ``fields``."""
    if choice != "auto" or not has_json_format(fields):
        return {}
    wanted = fields["response_format"]
    schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else {"type": "object"}
    del fields["response_format"]
    return {"answer": {"type": "json_schema", "json_schema": schema}}


def _client_path(path: str) -> str:
    found = re.match(r"\.args\.tools\[(\d+)\](.*)", path)
    if found:
        return f"tools[{found[1]}].function{found[2]}"
    if path.startswith(".args.answer.json_schema"):
        return "response_format.json_schema.schema" + path.removeprefix(".args.answer.json_schema")
    if path.startswith(".args.answer"):
        return "response_format"
    return "tools"


def structural_tag_as_processor(fields: Body) -> FieldProcessor | None:
    """The processor of a ``response_format`` of type ``structural_tag``, which is taken out of
    ``fields``; None if it is of another type.
    """
    wanted = fields.get("response_format")
    if not isinstance(wanted, dict) or wanted.get("type") != "structural_tag":
        return None
    del fields["response_format"]
    where = "response_format.format" if "format" in wanted else "response_format"
    made = processor("structural_tag", format=format_of(wanted))
    return FieldProcessor(made, lambda path: where + path.removeprefix(".args.format"), is_control=True)
