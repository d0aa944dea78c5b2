"""Tools in Anthropic's form as those of a chat."""

from __future__ import annotations

from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import Object

_KEYS = (
    "type",
    "name",
    "description",
    "input_schema",
    "strict",
    "cache_control",
    "input_examples",
    "eager_input_streaming",
    "defer_loading",
    "allowed_callers",
)
"""``cache_control`` is a hint, and ``eager_input_streaming`` has no effect: inputs are streamed as
they are generated. The last two have one value that is kept.
"""

_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}


def add_tools(fields: Object, chat: Object) -> None:
    """Set ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat.

    Args:
        fields: The request.
        chat: The chat request, which is changed.

    Raises:
        FieldRefused: a tool or the choice is malformed, or asks for what there is not.
    """
    tools = [] if fields.get("tools") is None else values.list_of("tools", fields["tools"])
    if tools:
        chat["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    choice = fields.get("tool_choice")
    if choice is None:
        return
    choice = values.object_of("tool_choice", choice)
    kind = values.one_of("tool_choice.type", choice.get("type"), _CHOICES)
    known = {"none": ("type",), "tool": ("type", "name", "disable_parallel_tool_use")}
    values.keys_within("tool_choice", choice, known.get(kind, ("type", "disable_parallel_tool_use")))
    is_single = values.truth("tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use"))
    if not tools:
        if kind in ("any", "tool"):
            raise FieldRefused("tool_choice", "asks for a call, and there are no tools")
        return
    chat["tool_choice"] = _named(choice) if kind == "tool" else _CHOICES[kind]
    if is_single:
        chat["parallel_tool_calls"] = False


def _named(choice: Object) -> Object:
    return {"type": "function", "function": {"name": values.text("tool_choice.name", choice.get("name"))}}


def _tool(path: str, given: Any) -> Object:
    tool = values.object_of(path, given)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise FieldRefused(
            f"{path}.type",
            f"must be custom, got {values.shown(kind)}: nothing runs on this server, and a tool that the client runs "
            "needs its input_schema",
        )
    values.keys_within(path, tool, _KEYS)
    values.cache_control(path, tool)
    values.truth(f"{path}.eager_input_streaming", tool.get("eager_input_streaming"))
    if values.truth(f"{path}.defer_loading", tool.get("defer_loading")):
        raise FieldRefused(f"{path}.defer_loading", "is not supported: there is no search for tools")
    if tool.get("allowed_callers") not in (None, [], ["direct"]):
        raise FieldRefused(f"{path}.allowed_callers", 'must be ["direct"]: no code runs on this server')
    function: Object = {"name": values.text(f"{path}.name", tool.get("name"))}
    if tool.get("description") is not None:
        function["description"] = values.text(f"{path}.description", tool["description"])
    function["parameters"] = _parameters(path, tool)
    if values.truth(f"{path}.strict", tool.get("strict")):
        function["strict"] = True
    return {"type": "function", "function": function}


def _parameters(path: str, tool: Object) -> Object:
    """The schema; examples of inputs go into it under JSON Schema's name for them."""
    schema = values.object_of(f"{path}.input_schema", tool.get("input_schema"))
    examples = tool.get("input_examples")
    if examples is None or examples == []:
        return schema
    for i, example in enumerate(values.list_of(f"{path}.input_examples", examples)):
        values.object_of(f"{path}.input_examples[{i}]", example)
    if "examples" in schema:
        raise FieldRefused(f"{path}.input_examples", "cannot be given beside examples of the input_schema")
    return {**schema, "examples": examples}
