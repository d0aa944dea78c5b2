"""Calls written in a format, as the model itself would write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from adapters.calls.formats import NUMBER, CallFormat
from adapters.calls.xml_values import TAGS


def written_calls(wanted: CallFormat, calls: Iterable[tuple[str, Mapping[str, Any] | str]]) -> str:
    """The text of ``calls``, of which there is at least one.

    Args:
        wanted: Format of the calls.
        calls: Name and arguments of each; arguments that are no object, as of a call that was cut,
            are a text, which is written as it is.
    """
    opening = wanted.openings[0].text
    spelled = [
        f"{_numbered(wanted.name_prefix, index)}{name}{_numbered(wanted.name_suffix, index)}"
        f"{_arguments(wanted, arguments)}{wanted.call_suffix}"
        for index, (name, arguments) in enumerate(calls)
    ]
    if wanted.between is not None:
        return f"{opening}{wanted.between.join(spelled)}{wanted.closing}"
    return wanted.again.join(f"{opening}{call}{wanted.closing}" for call in spelled)


def _numbered(text: str, index: int) -> str:
    return text.replace(NUMBER, str(index))


def _arguments(wanted: CallFormat, arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return arguments
    if wanted.arguments == "python":
        return ", ".join(f"{name}={_python(value)}" for name, value in arguments.items())
    if wanted.arguments == "keywords":
        return ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())
    tags = TAGS.get(wanted.arguments)
    if tags is not None:
        return "".join(f"{tags.open}{name}{tags.opened}{_raw(value)}{tags.close}" for name, value in arguments.items())
    return _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_python, value)) + "]"
    return repr(value) if value is None or isinstance(value, bool) else _json(value)
