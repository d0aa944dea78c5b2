"""Tools, calls and their results as text of a chat, where the chat template does not write them.

Dynamo's frontend gives the chat template what a client sends, and what the template does not know
is silently left out of the prompt. `ToolSupport` says what it knows, found by rendering it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from adapters.calls import FORMATS, CallFormat, written_calls
from adapters.calls.detection import ToolSupport
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.values import shown

_SHORT_ID_LENGTH = 9
_PART = "\n\n"
"""Separator of two texts that become one message."""


def write_tools_as_text(fields: Body, support: ToolSupport, choice: Any) -> bool:
    """Write into the messages what the chat template would leave out of the prompt, and take it out
    of ``fields``; whether that changed them.

    Args:
        fields: Fields of a chat, checked; their tools are functions with names.
        support: Abilities of the template.
        choice: The client's ``tool_choice``.

    Raises:
        FieldRefused: a call or a result in the messages cannot be written.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False  # the frontend refuses them
    if not isinstance(choice, str | dict | None) or not isinstance(fields.get("parallel_tool_calls"), bool | None):
        return False  # nor these
    wanted = FORMATS[support.format]
    if not support.calls or not support.results:
        changed = list(_as_text(messages, wanted))
    else:
        changed = list(_as_the_template_takes_them(messages, support))
    if fields.get("tools") and not support.tools:
        if choice != "none":
            changed = _with_instructions(changed, tools_text(fields, wanted, choice), has_system=support.system)
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            fields.pop(name, None)
    elif changed == messages:
        return False
    fields["messages"] = changed
    return True


def tools_text(fields: Body, wanted: CallFormat, choice: Any = "auto") -> str:
    """Description of the tools of a request, and of how to call them, for the model.

    Args:
        fields: Fields of a chat with tools.
        wanted: Format of the calls.
        choice: The client's ``tool_choice``.
    """
    functions = [tool["function"] for tool in fields["tools"]]
    described = [
        {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        for function in functions
    ]
    lines = ["You can call these functions:", *(json.dumps(each, ensure_ascii=False) for each in described)]
    lines += ["To call a function, write:", _example(wanted)]
    if isinstance(choice, dict):
        lines.append(f"Call {choice['function']['name']}.")
    elif choice == "required":
        lines.append("Call a function.")
    if fields.get("parallel_tool_calls") is False:
        lines.append("Call one function at most.")
    return "\n".join(lines)


def _example(wanted: CallFormat) -> str:
    """A call as the model is to write it."""
    text = written_calls(wanted, [("NAME", {"ARGUMENT": "VALUE"})])
    return text.replace('{"ARGUMENT":"VALUE"}', '{"ARGUMENT": VALUE}').replace('ARGUMENT="VALUE"', "ARGUMENT=VALUE")


def _with_instructions(messages: list[dict[str, Any]], text: str, *, has_system: bool) -> list[dict[str, Any]]:
    """The messages with ``text`` in the system message, or before the first one of a user."""
    roles = ("system", "developer") if has_system else ("system", "developer", "user")
    for index, message in enumerate(messages if not has_system else messages[:1]):
        if message.get("role") in roles:
            changed = {**message, "content": _joined_content(message.get("content"), text)}
            if message["role"] == "user":
                changed["content"] = _joined_content(text, message.get("content"))
            return [*messages[:index], changed, *messages[index + 1 :]]
    return [{"role": "system" if has_system else "user", "content": text}, *messages]


def _joined_content(first: Any, second: Any) -> Any:
    """Two contents, texts or lists of parts, as one."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_PART}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text_of(content: Any, path: str) -> str:
    """The text of a content that is one, or a list of parts that are."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise FieldRefused(path, "must be a text, or a list of parts that are")
    return "".join(texts)


def _as_text(messages: list[dict[str, Any]], wanted: CallFormat) -> Iterator[dict[str, Any]]:
    """The messages with calls and results as text: results are a user's, together with what the
    user says next.
    """
    names: dict[str, str] = {}
    results: list[str] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.get("role") == "tool":
            results.append(_result(message, names, path))
            continue
        if results and message.get("role") == "user":
            message = {**message, "content": _joined_content("\n".join(results), message.get("content"))}
        elif results:
            yield {"role": "user", "content": "\n".join(results)}
        results = []
        calls = message.get("tool_calls")
        written = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            named = list(_named_calls(calls, names, f"{path}.tool_calls"))
            said = _text_of(message.get("content"), f"{path}.content")
            between = "\n" if said and not said[-1].isspace() else ""  # a model's own white space is there already
            written["content"] = f"{said}{between}{written_calls(wanted, named)}"
        yield written
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _named_calls(calls: Any, names: dict[str, str], path: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Name and arguments of each call; ``names`` gets the name by the id."""
    for index, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FieldRefused(f"{path}[{index}].function", "must be an object with a name and arguments")
        if isinstance(call.get("id"), str):
            names[call["id"]] = function["name"]
        yield function["name"], _arguments(function.get("arguments"), f"{path}[{index}].function.arguments")


def _arguments(text: Any, path: str) -> dict[str, Any] | str:
    """The arguments of an earlier call; of one that was cut, or that has half of a surrogate pair,
    which only an escape can say, the text that there is.
    """
    if text is not None and not isinstance(text, str):
        raise FieldRefused(path, f"must be a text, got {shown(text)}")
    try:
        found = json.loads(text) if text else {}
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        found = None
    return found if isinstance(found, dict) else text or ""


def _result(message: dict[str, Any], names: dict[str, str], path: str) -> str:
    call_id = message.get("tool_call_id")
    name = message.get("name") or (names.get(call_id) if isinstance(call_id, str) else None)
    if name is None:
        raise FieldRefused(f"{path}.tool_call_id", "must be the id of an earlier call")
    return f"<tool_response>\n{name}: {_text_of(message.get('content'), f'{path}.content')}\n</tool_response>"


def _as_the_template_takes_them(messages: list[dict[str, Any]], support: ToolSupport) -> Iterator[dict[str, Any]]:
    """The messages of a template that knows calls and results, but not several calls of one
    message, or not every id.
    """
    if support.named_ids:
        messages = list(_with_named_ids(messages))
    at = 0
    while at < len(messages):
        message, end = messages[at], at + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        group = messages[at:end]
        calls = message.get("tool_calls")
        if not support.several and isinstance(calls, list) and len(calls) > 1:
            group = list(_one_by_one(message, calls, messages[at + 1 : end]))
        yield from (_with_short_ids(each) if support.short_ids else each for each in group)
        at = end


def _one_by_one(message: dict[str, Any], calls: list[Any], results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A message for each call, and its result behind it; those without a call last. Thinking and
    text are in the first one alone.
    """
    later = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": ""}
    by_id: dict[Any, list[dict[str, Any]]] = {}
    for result in results:
        by_id.setdefault(result.get("tool_call_id"), []).append(result)
    for index, call in enumerate(calls):
        yield {**(later if index else {**message, "content": message.get("content")}), "tool_calls": [call]}
        yield from by_id.pop(call.get("id"), ()) if isinstance(call, dict) else ()
    yield from (result for result in results if result.get("tool_call_id") in by_id)


def _with_named_ids(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages with ids ``functions.NAME:NUMBER``, calls counted from the first one on."""
    ids: dict[str, str] = {}
    count = 0
    for index, message in enumerate(messages):
        changed = dict(message)
        if isinstance(message.get("tool_calls"), list):
            names: dict[str, str] = {}
            called = [name for name, _ in _named_calls(message["tool_calls"], names, f"messages[{index}].tool_calls")]
            changed["tool_calls"] = []
            for call, name in zip(message["tool_calls"], called, strict=True):
                new = f"functions.{name}:{count}"
                count += 1
                if _has_id(call):
                    ids[call["id"]] = new
                changed["tool_calls"].append({**call, "id": new})
        if isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
        yield changed


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of nine letters and digits, the same for equal ones."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if _has_id(call) else call for call in message["tool_calls"]
        ]
    return changed


def _has_id(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("id"), str)


def _short_id(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_SHORT_ID_LENGTH]
