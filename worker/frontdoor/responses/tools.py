"""Tools of a Responses request as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import printable
from worker.frontdoor.field_types import list_at, object_at, text_at
from worker.frontdoor.responses.checks import refuse_unless
from worker.frontdoor.responses.kinds import TOOL_CHOICES, TOOLS, kind_at

Tool = dict[str, Any]
_MODES = ("auto", "required")


def chat_tools(tools: Any, choice: Any) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The fields ``tools`` and ``tool_choice`` of the chat, and where their parts come from.

    Args:
        tools: ``tools`` of the request.
        choice: ``tool_choice`` of the request.

    Returns:
        Fields of the chat; path in the chat request → path in the client's.

    Raises:
        FieldRefused: naming what cannot be kept.
    """
    given = [_function(f"tools[{i}]", tool) for i, tool in enumerate(list_at("tools", [] if tools is None else tools))]
    allowed: Sequence[int] = range(len(given))
    chosen: Any = choice
    if isinstance(choice, dict):
        chosen = _named(choice)
        if choice["type"] == "allowed_tools":
            allowed, chosen = _allowed(choice, given), choice["mode"]
    elif choice is not None:
        kind_at("tool_choice", choice, {name: row for name, row in TOOL_CHOICES.items() if not row.keys})
    fields: dict[str, Any] = {"tools": [given[i] for i in allowed]} if given else {}
    if chosen is not None and (given or chosen not in ("auto", "none")):
        fields["tool_choice"] = chosen
    return fields, {f"tools[{new}].function": f"tools[{old}]" for new, old in enumerate(allowed)} | {
        f"tools[{new}]": f"tools[{old}]" for new, old in enumerate(allowed)
    }


def _function(path: str, tool: Any) -> Tool:
    if not isinstance(tool, dict):
        raise FieldRefused(path, f"must be an object, got {type(tool).__name__}")
    kind = kind_at(f"{path}.type", tool.get("type"), TOOLS)
    object_at(path, tool, kind.keys)
    refuse_unless(
        f"{path}.allowed_callers", tool.get("allowed_callers"), ([], ["direct"]), "tools are called by the model alone"
    )
    refuse_unless(f"{path}.defer_loading", tool.get("defer_loading"), (False,), "all tools are in the prompt")
    refuse_unless(f"{path}.output_schema", tool.get("output_schema"), ({},), "results of calls are not checked")
    refuse_unless(f"{path}.async", tool.get("async"), (False,), "calls are not asynchronous")
    text_at(f"{path}.name", tool.get("name"))
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _named(choice: Mapping[str, Any]) -> Any:
    kind = kind_at("tool_choice.type", choice.get("type"), {n: r for n, r in TOOL_CHOICES.items() if _is_object(n)})
    object_at("tool_choice", choice, kind.keys)
    if kind.name == "function":
        return {"type": "function", "function": {"name": text_at("tool_choice.name", choice.get("name"))}}
    return None


def _is_object(name: str) -> bool:
    return name not in ("none", "auto", "required")


def _allowed(choice: Mapping[str, Any], given: Sequence[Tool]) -> list[int]:
    """Indices of the tools that a choice of type ``allowed_tools`` has."""
    mode = choice.get("mode")
    if mode not in _MODES:
        raise FieldRefused("tool_choice.mode", f"must be one of {', '.join(_MODES)}, got {printable(str(mode))}")
    places = {tool["function"]["name"]: i for i, tool in enumerate(given)}
    found: set[int] = set()
    for i, entry in enumerate(list_at("tool_choice.tools", choice.get("tools"))):
        path = f"tool_choice.tools[{i}]"
        object_at(path, entry, ("type", "name"))
        kind_at(f"{path}.type", entry.get("type"), TOOLS)
        name = text_at(f"{path}.name", entry.get("name"))
        if name not in places:
            raise FieldRefused(f"{path}.name", "is the name of none of the tools")
        found.add(places[name])
    if not found:
        raise FieldRefused("tool_choice.tools", "must have at least one tool")
    return sorted(found)
