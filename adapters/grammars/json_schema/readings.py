"""Values of keywords, checked: an error names the place and what was expected."""

from __future__ import annotations

from typing import Any, NoReturn

from adapters.grammars.json_schema.decimals import exact
from adapters.grammars.json_schema.documents import shown
from adapters.grammars.json_schema.ecma import searched
from adapters.grammars.json_schema.ecma_characters import PatternError
from adapters.grammars.json_schema.patterns import Language, TooComplex
from adapters.grammars.json_schema.shapes import FALSE, TRUE, Goal, SchemaRefused

_MOST_COUNTED = 2**31 - 1
"""Largest number that the compiler counts to; an answer never has as many characters or items."""


def denied(goal: Goal) -> Goal:
    """Negation of the goal of one schema."""
    if goal in (TRUE, FALSE):
        return FALSE if goal == TRUE else TRUE
    ((number, holds),) = goal
    return ((number, not holds),)


def cannot_deny(place: str) -> NoReturn:
    raise SchemaRefused(f"{place}: cannot be enforced where it is negated (not, oneOf or if)")


def pattern_of(pattern: Any, place: str) -> Language:
    if not isinstance(pattern, str):
        raise SchemaRefused(f"{place}: expected a regular expression, got {shown(pattern)}")
    try:
        return searched(pattern)
    except (PatternError, TooComplex) as error:
        raise SchemaRefused(f"{place}: {error}") from None


def number_of(value: Any, place: str) -> Any:
    try:
        return exact(value)
    except ValueError as error:
        raise SchemaRefused(f"{place}: {error}, got {shown(value)}") from None


def size_of(value: Any, place: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaRefused(f"{place}: expected an integer of at least 0, got {shown(value)}")
    return min(value, _MOST_COUNTED)


def list_of(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaRefused(f"{place}: expected a list, got {shown(value)}")
    return value


def map_of(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaRefused(f"{place}: expected an object, got {shown(value)}")
    return value


def names_of(value: Any, place: str) -> tuple[str, ...]:
    for name in list_of(value, place):
        if not isinstance(name, str):
            raise SchemaRefused(f"{place}: expected names, got {shown(name)}")
    return tuple(dict.fromkeys(writable(name, place) for name in value))


def writable(value: str, place: str) -> str:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise SchemaRefused(f"{place}: half of a surrogate pair in {shown(value)}")
    return value
