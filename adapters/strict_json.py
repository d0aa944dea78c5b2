"""JSON from clients, read in the one way in which every parser reads it (RFC 7493, I-JSON)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

_SHOWN = 60
"""Characters of a key or number that an error shows."""


class Ambiguous(ValueError):
    """Two parsers may read this text in two ways."""


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
    return found


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
