"""The ``tool_choice`` of a chat: whether it forces a call, and which tools it allows."""

from __future__ import annotations

from typing import Any, TypeGuard

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import Object

MODES = ("auto", "required")
"""Modes of a choice of type ``allowed_tools``."""

_ALLOWED = "tool_choice.allowed_tools"


def is_allowed_tools(choice: Any) -> TypeGuard[Object]:
    """Whether a ``tool_choice`` names the tools that may be called."""
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def forces_call(body: Object) -> bool:
    """Whether ``tool_choice`` asks for a call, of any tool or of one."""
    choice = body.get("tool_choice")
    if is_allowed_tools(choice):
        allowed = choice.get("allowed_tools")
        return isinstance(allowed, dict) and allowed.get("mode") == "required"
    return choice == "required" or isinstance(choice, dict)


def allowed_places(body: Object) -> list[int] | None:
    """Places among ``tools`` of those that may be called, None if ``tool_choice`` names none.

    Raises:
        FieldRefused: naming the path of what is malformed, or is the name of no tool.
    """
    choice = body.get("tool_choice")
    if not is_allowed_tools(choice):
        return None
    values.keys_within("tool_choice", choice, ("type", "allowed_tools"))
    allowed = values.object_within(_ALLOWED, choice.get("allowed_tools"), ("mode", "tools"))
    values.one_of(f"{_ALLOWED}.mode", allowed.get("mode"), MODES)
    entries = values.list_of(f"{_ALLOWED}.tools", allowed.get("tools"))
    if not entries:
        raise FieldRefused(f"{_ALLOWED}.tools", "must have at least one tool")
    places = places_of(body.get("tools"))
    return sorted({_place(f"{_ALLOWED}.tools[{i}]", entry, places) for i, entry in enumerate(entries)})


def with_allowed_tools(body: Object) -> Object:
    """The body whose tools are those that may be called, with the mode as ``tool_choice``; ``body``
    itself if all may. Raises `FieldRefused` as `allowed_places`.
    """
    places = allowed_places(body)
    if places is None:
        return body
    tools = [body["tools"][place] for place in places]
    return {**body, "tools": tools, "tool_choice": body["tool_choice"]["allowed_tools"]["mode"]}


def places_of(tools: Any) -> dict[str, int]:
    """Indices of the tools by the names of their functions. Raises `FieldRefused` for a second
    tool of one name.
    """
    places: dict[str, int] = {}
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        name = function_name(tool)
        if name is not None and places.setdefault(name, place) != place:
            raise FieldRefused(f"tools[{place}].function.name", "is the name of an earlier tool")
    return places


def function_name(tool: Any) -> str | None:
    """The name of the function that a tool is; None if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _place(path: str, entry: Any, places: dict[str, int]) -> int:
    values.object_within(path, entry, ("type", "function"))
    values.one_of(f"{path}.type", entry.get("type"), ("function",))
    function = values.object_within(f"{path}.function", entry.get("function"), ("name",))
    name = values.text(f"{path}.function.name", function.get("name"))
    if name not in places:
        raise FieldRefused(f"{path}.function.name", "is the name of none of the tools")
    return places[name]
