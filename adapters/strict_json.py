"""JSON from clients, read in the one way in which every parser reads it (RFC 7493, I-JSON)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

_SHOWN = 60
"""Characters of a key or number that an error shows."""


class Ambiguous(ValueError):
    """Two parsers may read this text in two ways."""


class LoneSurrogate(Ambiguous):
    """A text has half of a surrogate pair, which is no character: parsers drop, replace or keep it.

    Args:
        path: JSON path of the text, for example ``messages[0].content``.
    """

    def __init__(self, path: str) -> None:
        self.path = "".join(each if each.isprintable() else "?" for each in path[:_SHOWN])
        super().__init__(f"has half of a surrogate pair in {self.path}")


class RepeatedKey(Ambiguous):
    """A key occurs twice in one object, of which one parser takes the first and another the last.

    Args:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {json.dumps(key[:_SHOWN])} occurs twice in one object")
        self.key = key


def decoder(parse_int: Callable[[str], int] | None = None, *, checks_floats: bool = True) -> json.JSONDecoder:
    """A decoder that raises `Ambiguous` for repeated keys, NaN, and numbers beyond float64.

    Args:
        parse_int: Makes an integer of its digits, instead of `int`.
        checks_floats: False where no number of the text can be beyond float64: a check is a call of
            a Python function per number.
    """
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_float=_float if checks_floats else None,
        parse_int=parse_int,
        parse_constant=_constant,
    )


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object that ``data`` is, in UTF-8.

    Raises:
        RepeatedKey: a key occurs twice in one object.
        LoneSurrogate: a text is none.
        ValueError: it is no JSON object, or nested too deep, or ambiguous in another way; the text
            goes on after a subject ("the body").
    """
    try:
        found = _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except RepeatedKey:
        raise
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {type(found).__name__}")
    if _SURROGATE.search(data):
        _check_texts(found)
    return found


def _check_texts(found: dict[str, Any]) -> None:
    """Raises `LoneSurrogate` for the first text, or key, that is not Unicode."""
    waiting: list[tuple[str, Any]] = [("", found)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
                raise LoneSurrogate(path)
        elif isinstance(value, dict):
            for key, child in value.items():
                below = f"{path}.{key}" if path else key
                waiting += ((below, child), (f"a key of {path}" if path else "a key", key))
        elif isinstance(value, list):
            waiting += ((f"{path}[{index}]", child) for index, child in enumerate(value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return found


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Ambiguous(f"the number {digits[:_SHOWN]} is out of range")
    return value


def _constant(name: str) -> NoReturn:
    raise Ambiguous(f"{name} is not JSON")


_DECODER = decoder()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Matches all JSON with half of a surrogate pair, and some other: UTF-8 has only escapes for it."""
