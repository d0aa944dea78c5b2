"""Tools of a Responses request as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.responses.checks import refuse_unless
from worker.frontdoor.responses.kinds import TOOL_CHOICES, TOOLS, kind_at

Tool = dict[str, Any]
_CHAT_ALLOWED = "tool_choice.allowed_tools"


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
    given = [
        _function(f"tools[{i}]", tool) for i, tool in enumerate(values.list_of("tools", [] if tools is None else tools))
    ]
    chosen: Any = choice
    origins = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(given))}
    if isinstance(choice, dict):
        chosen = _named(choice)
        if choice["type"] == "allowed_tools":
            chosen, more = _allowed(choice)
            origins |= more
    elif choice is not None:
        kind_at("tool_choice", choice, {name: row for name, row in TOOL_CHOICES.items() if not row.keys})
    fields: dict[str, Any] = {"tools": given} if given else {}
    if chosen is not None and (given or chosen not in ("auto", "none")):
        fields["tool_choice"] = chosen
    return fields, origins


def _function(path: str, tool: Any) -> Tool:
    kind = kind_at(f"{path}.type", values.object_of(path, tool).get("type"), TOOLS)
    values.keys_within(path, tool, kind.keys)
    refuse_unless(
        f"{path}.allowed_callers", tool.get("allowed_callers"), ([], ["direct"]), "tools are called by the model alone"
    )
    refuse_unless(f"{path}.defer_loading", tool.get("defer_loading"), (False,), "all tools are in the prompt")
    refuse_unless(f"{path}.output_schema", tool.get("output_schema"), ({},), "results of calls are not checked")
    refuse_unless(f"{path}.async", tool.get("async"), (False,), "calls are not asynchronous")
    values.text(f"{path}.name", tool.get("name"))
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _named(choice: Mapping[str, Any]) -> Any:
    kind = kind_at("tool_choice.type", choice.get("type"), {n: r for n, r in TOOL_CHOICES.items() if _is_object(n)})
    values.object_within("tool_choice", choice, kind.keys)
    if kind.name == "function":
        return {"type": "function", "function": {"name": values.text("tool_choice.name", choice.get("name"))}}
    return None


def _is_object(name: str) -> bool:
    return name not in ("none", "auto", "required")


def _allowed(choice: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Chat's form of a choice of type ``allowed_tools``, and where its parts come from."""
    entries, origins = [], {_CHAT_ALLOWED: "tool_choice"}
    for i, entry in enumerate(values.list_of("tool_choice.tools", choice.get("tools"))):
        path = f"tool_choice.tools[{i}]"
        values.object_within(path, entry, ("type", "name"))
        kind_at(f"{path}.type", entry.get("type"), TOOLS)
        entries.append({"type": "function", "function": {"name": values.text(f"{path}.name", entry.get("name"))}})
        origins[f"{_CHAT_ALLOWED}.tools[{i}].function"] = path
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": entries}}, origins
