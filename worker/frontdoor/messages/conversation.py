"""Messages in Anthropic's form as those of a chat.

A message has a list of blocks, and consecutive messages of one role are one turn. A chat has texts,
calls beside the text of an assistant, and a message for each result of a tool.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.messages.pictures import picture_part
from worker.frontdoor.messages.thinking import thought_of
from worker.frontdoor.values import Object

_NO_DOCUMENTS = "this worker serves text and pictures"
_ELSEWHERE = "pictures stand in messages of the user, beside its text"
_TEXT_KEYS = ("type", "text", "cache_control", "citations")
_CALL_KEYS = ("type", "id", "name", "input", "cache_control", "caller")
_RESULT_KEYS = ("type", "tool_use_id", "content", "is_error", "cache_control")
_ROLES = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
"""Blocks that each role may have."""

_ERROR = "Error: "
"""Begins the text of a result with ``is_error``, for which chats have no field."""


@dataclass(slots=True)
class Conversation:
    """Messages of a chat.

    Attributes:
        messages: The messages.
        paths: Path of the client's message for each of them.
        pictures: Path of the client's picture for that of each part of the chat that is one.
    """

    messages: list[Object] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, role: str, content: str | list[Object], **fields: Any) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content, **fields})
        self.paths.append(path)

    def add_user(self, path: str, parts: Sequence[tuple[str, Object]]) -> None:
        """Add a message of the user: its texts and pictures, each with its path."""
        if all(part["type"] == "text" for _, part in parts):
            self.add(path, "user", "\n".join(part["text"] for _, part in parts))
            return
        content: list[Object] = []
        for are_texts, alike in groupby(parts, lambda each: each[1]["type"] == "text"):
            if are_texts:
                content.append({"type": "text", "text": "\n".join(part["text"] for _, part in alike)})
                continue
            for place, part in alike:
                self.pictures[f"messages[{len(self.messages)}].content[{len(content)}]"] = place
                content.append(part)
        self.add(path, "user", content)

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"


@dataclass(slots=True)
class _Turn:
    """The blocks of consecutive messages of one role, each with its path."""

    path: str
    role: str
    blocks: list[tuple[str, Object]]


def conversation(fields: Object) -> Conversation:
    """The chat's messages for ``system`` and ``messages`` of a request.

    Raises:
        FieldRefused: one is malformed, or has what there is not.
    """
    found = Conversation()
    system = fields.get("system")
    if system is not None and system != [] and system != "":
        found.add("system", "system", _joined("system", system))
    calls: set[str] = set()
    for turn in _turns(values.list_of("messages", fields["messages"])):
        if turn.role == "user":
            _add_user(found, turn, calls)
        elif turn.role == "assistant":
            _add_assistant(found, turn, calls)
        else:
            found.add(turn.path, "system", "\n".join(_text(path, block) for path, block in turn.blocks))
    if not found.messages or found.paths == ["system"]:
        raise FieldRefused("messages", "must have at least one message")
    _check_continued(found)
    return found


def _turns(messages: Sequence[Any]) -> list[_Turn]:
    turns: list[_Turn] = []
    for i, each in enumerate(messages):
        path = f"messages[{i}]"
        message = values.object_within(path, each, ("role", "content"))
        role = values.one_of(f"{path}.role", message.get("role"), _ROLES)
        blocks = _blocks(f"{path}.content", message.get("content"), _ROLES[role])
        if not blocks and role != "assistant":  # an answer may be empty, and comes back
            raise FieldRefused(f"{path}.content", "must have at least one block")
        if turns and turns[-1].role == role:
            turns[-1].blocks += blocks
        else:
            turns.append(_Turn(path, role, blocks))
    return turns


def _blocks(path: str, content: Any, known: Sequence[str]) -> list[tuple[str, Object]]:
    """The blocks of ``content``, a text or a list of blocks, with their paths."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise FieldRefused(path, f"must be a text or a list of blocks, got {values.shown(content)}")
    found = []
    for i, each in enumerate(content):
        block = values.object_of(f"{path}[{i}]", each)
        kind = block.get("type")
        if kind == "redacted_thinking":
            raise FieldRefused(f"{path}[{i}]", "is encrypted by another server, and cannot be read here; leave it out")
        if kind in ("image", "document", "search_result") and kind not in known:
            why = _ELSEWHERE if kind == "image" else _NO_DOCUMENTS
            raise FieldRefused(f"{path}[{i}].type", f"must be one of {', '.join(known)}; got {kind}: {why}")
        values.one_of(f"{path}[{i}].type", kind, known)
        values.cache_control(f"{path}[{i}]", block)
        found.append((f"{path}[{i}]", block))
    return found


def _text(path: str, block: Object) -> str:
    values.keys_within(path, block, _TEXT_KEYS)
    if block.get("citations") not in (None, []):
        raise FieldRefused(f"{path}.citations", "is not supported; leave it out")
    return values.text(f"{path}.text", block.get("text"))


def _joined(path: str, content: Any) -> str:
    """The text of what may be a text or blocks of text."""
    return "\n".join(_text(each, block) for each, block in _blocks(path, content, ("text",)))


def _add_user(found: Conversation, turn: _Turn, calls: set[str]) -> None:
    parts: list[tuple[str, Object]] = []

    def add_parts() -> None:
        if parts:
            found.add_user(turn.path, parts)
            parts.clear()

    for path, block in turn.blocks:
        if block["type"] == "text":
            parts.append((path, {"type": "text", "text": _text(path, block)}))
        elif block["type"] == "image":
            parts.append(picture_part(path, block))
        else:
            add_parts()
            _add_result(found, path, block, calls)
    add_parts()


def _add_result(found: Conversation, path: str, block: Object, calls: set[str]) -> None:
    values.keys_within(path, block, _RESULT_KEYS)
    call = values.text(f"{path}.tool_use_id", block.get("tool_use_id"))
    if call not in calls:
        raise FieldRefused(f"{path}.tool_use_id", "is the id of no tool_use block before it")
    content = block.get("content")
    result = "" if content is None else _joined(f"{path}.content", content)
    if values.truth(f"{path}.is_error", block.get("is_error")):
        result = _ERROR + result
    found.add(path, "tool", result, tool_call_id=call)


def _add_assistant(found: Conversation, turn: _Turn, calls: set[str]) -> None:
    texts, thoughts, called = [], [], []
    for path, block in turn.blocks:
        if block["type"] == "text":
            texts.append(_text(path, block))
        elif block["type"] == "thinking":
            thoughts.append(thought_of(path, block))
        else:
            called.append(_call(path, block, calls))
    more: Object = {}
    if thoughts:
        more["reasoning_content"] = "".join(thoughts)
    if called:
        more["tool_calls"] = called
    found.add(turn.path, "assistant", "".join(texts), **more)


def _call(path: str, block: Object, calls: set[str]) -> Object:
    values.keys_within(path, block, _CALL_KEYS)
    caller = block.get("caller")
    if caller is not None and caller != {"type": "direct"}:
        raise FieldRefused(f"{path}.caller", 'must be {"type": "direct"}: no code runs on this server')
    id = values.text(f"{path}.id", block.get("id"))
    if id in calls:
        raise FieldRefused(f"{path}.id", "is the id of an earlier tool_use block")
    calls.add(id)
    arguments = json.dumps(values.object_of(f"{path}.input", block.get("input")), ensure_ascii=False)
    name = values.text(f"{path}.name", block.get("name"))
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_continued(found: Conversation) -> None:
    """Raises `FieldRefused` if the last message is an assistant's that no answer continues."""
    last, path = found.messages[-1], found.paths[-1]
    if not found.continues:
        return
    if "tool_calls" in last:
        raise FieldRefused(path, "has tool_use blocks, and no message with their results follows")
    if not last["content"]:
        raise FieldRefused(path, "has no text that an answer could continue; end with a message of the user")
