"""Input items of a Responses request, checked, and written out as the API gives them back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.responses.checks import refuse_unless
from worker.frontdoor.responses.kinds import ITEMS, PARTS, kind_at
from worker.frontdoor.values import printable, shown

Item = dict[str, Any]
Found = Callable[[str], Item | None]
"""The stored item with an id, None if there is none."""

ROLES = ("user", "assistant", "system", "developer")
PICTURE = "input_image"
"""Type of a part that is a picture."""

_TEXT = ("input_text",)
_ALLOWED = {"user": (*_TEXT, PICTURE), "assistant": (*_TEXT, "output_text", "refusal")}
"""Parts of messages by role; those of the others are texts."""

_STATUSES = ("in_progress", "completed", "incomplete")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item, and where the request has it.

    Attributes:
        path: Path in the client's request, as ``input[2]``.
        item: The item, written out: with ``type`` and ``id``, and a message's content as parts.
        whole: The content of a message was one text, so that it has no paths of parts.
    """

    path: str
    item: Item
    whole: bool = False


def new_id(kind: str) -> str:
    """A new id of an item of type ``kind``, or with that word as its prefix."""
    return f"{_PREFIXES.get(kind, kind)}_{secrets.token_hex(24)}"


def input_items(value: Any, found: Found) -> list[PlacedItem]:
    """The items of a request's ``input``; a text is a message of the user's.

    Args:
        value: The field.
        found: Looks up what an ``item_reference`` stands for.

    Raises:
        FieldRefused: naming the path of what is wrong.
    """
    if isinstance(value, str):
        return [PlacedItem("input", _message("input", {"role": "user", "content": value}), whole=True)]
    if not isinstance(value, list):
        raise FieldRefused("input", f"must be a text or a list of items, got {shown(value)}")
    return [_placed(f"input[{i}]", item, found) for i, item in enumerate(value)]


def _placed(path: str, item: Any, found: Found) -> PlacedItem:
    kind = kind_at(f"{path}.type", _type_of(values.object_of(path, item)), ITEMS)
    values.keys_within(path, item, kind.keys)
    if kind.name == "item_reference":
        stored = found(values.text(f"{path}.id", item.get("id")))
        if stored is None:
            raise FieldRefused(f"{path}.id", f"no stored item has the id {printable(item['id'])}")
        return PlacedItem(path, stored)
    whole = isinstance(item.get("content"), str)
    return PlacedItem(path, _WRITTEN_OUT[kind.name](path, item), whole)


def _type_of(item: Mapping[str, Any]) -> Any:
    """The type of an item, which messages and references may leave out."""
    if item.get("type") is not None:
        return item["type"]
    return "item_reference" if "role" not in item and "id" in item else "message"


def _with_id(path: str, item: Mapping[str, Any], kind: str, **fields: Any) -> Item:
    given = item.get("id")
    status = item.get("status") or "completed"
    if status not in _STATUSES:
        raise FieldRefused(f"{path}.status", f"must be one of {', '.join(_STATUSES)}, got {shown(status)}")
    return {
        "id": new_id(kind) if given is None else values.text(f"{path}.id", given),
        "type": kind,
        "status": status,
        **fields,
    }


def _message(path: str, item: Mapping[str, Any]) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise FieldRefused(f"{path}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    elif not isinstance(content, list):
        raise FieldRefused(f"{path}.content", f"must be a text or a list of parts, got {shown(content)}")
    parts = [_part(f"{path}.content[{i}]", part, _ALLOWED.get(role, _TEXT)) for i, part in enumerate(content)]
    if role == "assistant":
        parts = [_as_output(part) for part in parts]
    phase = {} if item.get("phase") is None else {"phase": item["phase"]}
    return _with_id(path, item, "message", role=role, content=parts, **phase)


def _part(path: str, part: Any, allowed: Sequence[str]) -> Item:
    kind = kind_at(f"{path}.type", values.object_of(path, part).get("type"), PARTS)
    if kind.name not in allowed:
        problem = f"must be {' or '.join(allowed)} here, got {kind.name}"
        where = "; pictures are parts of a user's message" if kind.name == PICTURE else ""
        raise FieldRefused(f"{path}.type", problem + where)
    values.keys_within(path, part, kind.keys)
    if kind.name == PICTURE:
        return _picture(path, part)
    values.text(f"{path}.{_text_key(part)}", part.get(_text_key(part)))
    return {key: value for key, value in part.items() if value is not None and key != "parsed"}


def _picture(path: str, part: Mapping[str, Any]) -> Item:
    if part.get("file_id") is not None:
        raise FieldRefused(f"{path}.file_id", "no files of pictures are kept here; give image_url, perhaps a data: URL")
    values.text(f"{path}.image_url", part.get("image_url"))
    return {"detail": "auto", **{key: value for key, value in part.items() if value is not None}}


def _text_key(part: Mapping[str, Any]) -> str:
    return "refusal" if part["type"] == "refusal" else "text"


def text_of(part: Mapping[str, Any]) -> str:
    """The text of a part."""
    text: str = part[_text_key(part)]
    return text


def _as_output(part: Item) -> Item:
    """A part of an assistant's message as the API has it, whichever type the client gave it."""
    if part["type"] == "refusal":
        return part
    return {"annotations": [], **part, "type": "output_text"}


def _function_call(path: str, item: Mapping[str, Any]) -> Item:
    named = {key: values.text(f"{path}.{key}", item.get(key)) for key in ("call_id", "name", "arguments")}
    _refuse_callers(path, item)
    refuse_unless(f"{path}.async", item.get("async"), (False,), "calls are not asynchronous")
    return _with_id(path, item, "function_call", **named)


def _function_call_output(path: str, item: Mapping[str, Any]) -> Item:
    call_id = values.text(f"{path}.call_id", item.get("call_id"))
    _refuse_callers(path, item)
    output = item.get("output")
    if not isinstance(output, str):
        parts = values.list_of(f"{path}.output", output)
        output = [_part(f"{path}.output[{i}]", part, ("input_text",)) for i, part in enumerate(parts)]
    name = {} if item.get("name") is None else {"name": values.text(f"{path}.name", item["name"])}
    return _with_id(path, item, "function_call_output", call_id=call_id, output=output, **name)


def _refuse_callers(path: str, item: Mapping[str, Any]) -> None:
    refuse_unless(f"{path}.caller", item.get("caller"), ({"type": "direct"},), "tools are called by the model alone")
    refuse_unless(f"{path}.namespace", item.get("namespace"), ("",), "tools have no namespaces here")


def _reasoning(path: str, item: Mapping[str, Any]) -> Item:
    if item.get("encrypted_content") is not None:
        raise FieldRefused(f"{path}.encrypted_content", "is not of this server, which cannot read it; give content")
    summary = _texts(f"{path}.summary", item.get("summary"), "summary_text")
    content = _texts(f"{path}.content", item.get("content"), "reasoning_text")
    return _with_id(path, item, "reasoning", summary=summary, content=content)


def _texts(path: str, value: Any, kind: str) -> list[Item]:
    parts = [] if value is None else values.list_of(path, value)
    for i, part in enumerate(parts):
        values.object_within(f"{path}[{i}]", part, ("type", "text"))
        if part.get("type") != kind:
            raise FieldRefused(f"{path}[{i}].type", f"must be {kind}, got {shown(part.get('type'))}")
        values.text(f"{path}[{i}].text", part.get("text"))
    return parts


_WRITTEN_OUT: Mapping[str, Callable[[str, Mapping[str, Any]], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}
