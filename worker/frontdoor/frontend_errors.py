"""Errors of Dynamo's frontend, in OpenAI's form and with the field that they are about."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from worker.errors import PROMPT_TOO_LONG
from worker.frontdoor.errors import MODEL_NOT_FOUND, Refused, code_of
from worker.frontdoor.field_checks import Body
from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.values import printable

_VALIDATION = "Validation: "
_ENUMS = {"Stop": "stop", "Prompt": "prompt", "ChatCompletionToolChoiceOption": "tool_choice"}
"""Types of the frontend that have several forms, and the fields that are of them."""

_KEY = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing field `([^`]*)`")
_ENUM = re.compile(r"untagged enum (\w+)")
_VALUE = re.compile(
    r"unknown variant `(?P<variant>[^`]*)`|invalid (?:type|value): "
    r"(?:(?:integer|floating point|boolean) `(?P<scalar>[^`]*)`|(?P<kind>map|sequence)"
    r'|string (?P<text>"(?:[^"\\]|\\.)*")|(?P<null>null))'
)
_CONTAINERS = {"include_usage": "stream_options.include_usage"}
"""Fields that are required in an object, by name."""

_QUOTED = re.compile(r"`[^`]*`|\"(?:[^\"\\]|\\.)*\"")
"""A text that an error shows."""

_MOST_VALUES = 100_000
"""Values of a body among which the one that an error shows is looked for."""


def error_of(status: int, body: bytes) -> Refused:
    """The error that a frontend answered with, in its form or in OpenAI's.

    Args:
        status: HTTP status, unless the body has another one as ``code``.
        body: The answer's body.
    """
    try:
        found = json.loads(body)
        error = found.get("error", found)
        message, code = error["message"], error.get("code")
        kind, param = error.get("type"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        if status == 404 and not body:  # it has no route for what no worker has registered
            return Refused(503, "no worker serves this at present", kind="server_error")
        return Refused(status if status >= 400 else 502, body.decode(errors="replace")[:1000] or "no answer")
    status = code if isinstance(code, int) and 400 <= code < 600 else max(status, 400)
    message = str(message)
    if param is None and (param := _field_of(message)) is not None and message.startswith(_VALIDATION):
        message = f"{param}: {message.removeprefix(_VALIDATION).removeprefix(f'`{param}` ')}"
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = kind if isinstance(kind, str) and "_" in kind else default
    if message.startswith("This model's maximum context length"):
        message = f"{PROMPT_TOO_LONG} {message}"
    code = code if isinstance(code, str) else code_of(message)
    if status == 404 and message == "Model not found":
        message, param, code = MODEL_NOT_FOUND, "model", "model_not_found"
    return Refused(status, message, param, kind=kind, code=code)


def shortened(message: str) -> str:
    """An error's message with at most 60 characters of each text that it shows."""
    return _QUOTED.sub(lambda found: found[0] if len(found[0]) <= 62 else f"{found[0][:58]}...{found[0][-1]}", message)


def field_in(message: str, path: str, fields: Body) -> str | None:
    """The field of a request that the frontend's error is about, None if it cannot be told.

    Args:
        message: Message of an error without ``param``.
        path: `CHAT` or `COMPLETIONS`.
        fields: The request that was sent.
    """
    if message.startswith(PROMPT_TOO_LONG):
        return "messages" if path == CHAT else "prompt"
    if message == "Invalid request":  # 1.6.1's reason for ids beyond the vocabulary
        return _ids_in(path, fields)
    if "recursion limit" in message:
        place = max((place for place, _, _ in _values(fields)), key=lambda each: each.depth)
        return re.split(r"[.\[]", place.path, maxsplit=1)[0]
    if "number out of range" in message:
        return next((place.path for place, _, value in _values(fields) if _is_beyond_float(value)), None)
    enum, missing, key = _ENUM.search(message), _MISSING.search(message), _KEY.search(message)
    if enum and enum[1].endswith("MessageContent"):
        return _message_without_content(fields) or "messages"
    if enum:
        return _ENUMS.get(enum[1], "messages" if "Message" in enum[1] else None)
    if missing and missing[1] == "content":
        return _message_without_content(fields) or "content"
    if missing:
        return _CONTAINERS.get(missing[1], missing[1])
    if key:
        return next((place.path for place, name, _ in _values(fields) if name == key[1]), key[1])
    shown = _VALUE.search(message)
    places = [] if shown is None else [place for place, _, value in _values(fields) if _is_shown(value, shown)]
    return places[0].path if len(places) == 1 else None


def _message_without_content(fields: Body) -> str | None:
    """The first message that needs a content and has none: the assistant's need none. None if all
    have it.
    """
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") != "assistant" and message.get("content") is None:
            return f"messages[{i}].content"
    return None


def _ids_in(path: str, fields: Body) -> str | None:
    """The field of a request that has token ids as its prompt."""
    if path == CHAT:
        nvext = fields.get("nvext")
        return "nvext.token_data" if isinstance(nvext, dict) and nvext.get("token_data") is not None else None
    return "prompt" if isinstance(fields.get("prompt"), list) else None


def _field_of(message: str) -> str | None:
    """The field that an error's message is about, None if it says none.

    The frontend's own checks name it in quotes, or write out its name: "Max tokens must be".
    """
    if message.startswith(_VALIDATION):
        quoted = re.search(r"[`']([\w.\[\]]+)[`']", message)
        if quoted:
            return quoted[1]
        written_out = message.removeprefix(_VALIDATION).lower().replace(" ", "_")
        names = {name for table in TABLES.values() for name in table if written_out.startswith(name)}
        return max(names, key=len, default=None)
    field, colon, _ = message.partition(": ")
    return field if colon and " " not in field else None


class _Place(NamedTuple):
    """Place of a value in a request. Its path is written where it is shown: a list has many items,
    whose paths all begin with that of the list.

    Attributes:
        outer: Place of the object or list that it is in, None at the top.
        step: The key of the value, or its index.
        depth: Number of objects and lists around it.
    """

    outer: _Place | None
    step: str | int
    depth: int

    @property
    def path(self) -> str:
        """Path of the value."""
        steps: list[str] = []
        place: _Place | None = self
        while place is not None:
            steps.append(f"[{place.step}]" if isinstance(place.step, int) else f".{printable(place.step)}")
            place = place.outer
        return "".join(reversed(steps)).removeprefix(".")


def _values(fields: Body) -> Iterator[tuple[_Place, str, Any]]:
    """Place, key and value of everything in a request, up to `_MOST_VALUES`."""
    waiting = deque((_Place(None, name, 0), name, value) for name, value in fields.items())
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        place, name, value = waiting.popleft()
        yield place, name, value
        depth = place.depth + 1
        if isinstance(value, dict):
            waiting += [(_Place(place, key, depth), key, each) for key, each in value.items()]
        elif isinstance(value, list):
            waiting += [(_Place(place, i, depth), name, each) for i, each in enumerate(value)]


def _is_beyond_float(value: Any) -> bool:
    return type(value) is int and value.bit_length() > 1024


def _is_shown(value: Any, shown: re.Match[str]) -> bool:
    """Whether a value is the one that an error shows."""
    if shown["null"]:
        return value is None
    if shown["kind"]:
        return isinstance(value, dict if shown["kind"] == "map" else list)
    if shown["scalar"]:
        if isinstance(value, bool) or not isinstance(value, int | float) or _is_beyond_float(value):
            return json.dumps(value) == shown["scalar"] if isinstance(value, bool) else False
        if shown["scalar"] == "-0.0" and value == 0:  # an integer here, where it has no sign
            return True
        return json.dumps(value) == shown["scalar"] or repr(float(value)) == shown["scalar"]
    text = shown["variant"]
    if text is None:
        try:
            text = json.loads(shown["text"])
        except ValueError:
            return False
    return bool(value == text)
