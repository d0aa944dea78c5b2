"""JSON from clients, read in the one way in which every parser reads it (RFC 7493, I-JSON)."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

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
        self.path = _printable(path)
        super().__init__(f"has half of a surrogate pair in {self.path}")


class RepeatedKey(Ambiguous):
    """A key occurs twice in one object, of which one parser takes the first and another the last.

    Args:
        key: The key.
        path: JSON path of the key, where it is known.
    """

    def __init__(self, key: str, path: str | None = None) -> None:
        super().__init__(f"the key {json.dumps(key[:_SHOWN])} occurs twice in one object")
        self.path = _printable(key if path is None else path)


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
    except RepeatedKey as error:
        raise _with_path(error, data.decode()) from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        if type(error) is ValueError:  # of `int`, which reads so many digits and no more
            raise ValueError(f"has an integer of more than {sys.get_int_max_str_digits()} digits") from None
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {type(found).__name__}")
    if _SURROGATE.search(data):
        _check_texts(found)
    return found


def _check_texts(found: dict[str, Any]) -> None:
    """Raises `LoneSurrogate` for a text, or key, that is not Unicode."""
    for place, value in _values(found):
        if isinstance(value, str) and has_half_a_pair(value):
            raise LoneSurrogate(_path_to(place))
        if isinstance(value, dict) and any(map(has_half_a_pair, value)):
            path = _path_to(place)
            raise LoneSurrogate(f"a key of {path}" if path else "a key")


def has_half_a_pair(text: str) -> bool:
    """Whether a text has half of a surrogate pair, which no tokenizer takes."""
    return not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)


_Place: TypeAlias = "tuple[_Place, str | int] | None"
"""Place of a value in a JSON value: that of what it is in, and its key or index there. Its path is
not written before it is shown: those of a list's items have the key of the list, each of them.
"""


def _values(found: Any) -> Iterator[tuple[_Place, Any]]:
    """All values in a JSON value, itself among them, with their places."""
    waiting: list[tuple[_Place, Any]] = [(None, found)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        if isinstance(value, dict):
            waiting += (((place, key), child) for key, child in value.items())
        elif isinstance(value, list):
            waiting += (((place, index), child) for index, child in enumerate(value))


def _path_to(place: _Place) -> str:
    """The path of a place, as far as an error shows it."""
    steps = list[str | int]()
    while place is not None:
        place, step = place
        steps.append(step)
    path = ""
    for step in reversed(steps):
        if len(path) > _SHOWN:
            break
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


class _Ambiguous(dict[str, Any]):
    """An object in which `key` is repeated."""

    def __init__(self, pairs: list[tuple[str, Any]], key: str) -> None:
        super().__init__(pairs)
        self.key = key


def _with_path(error: RepeatedKey, text: str) -> RepeatedKey:
    """The error about ``text`` with the path of a key that is repeated there."""
    try:
        found = json.loads(text, object_pairs_hook=_marked)
    except (ValueError, RecursionError):  # it is no JSON behind the key
        return error
    place, value = next((place, value) for place, value in _values(found) if isinstance(value, _Ambiguous))
    path = _path_to(place)
    return RepeatedKey(value.key, f"{path}.{value.key}" if path else value.key)


def _marked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    key = _repeated_key(pairs)
    return dict(pairs) if key is None else _Ambiguous(pairs, key)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKey(str(_repeated_key(pairs)))
    return found


def _repeated_key(pairs: list[tuple[str, Any]]) -> str | None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def _printable(path: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in path[:_SHOWN])


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
