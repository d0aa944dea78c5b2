"""Tables of fields of the endpoints for trainers: what each becomes, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.errors import path_within
from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.field_types import is_one_of
from worker.frontdoor.values import printable

TEXT_ONLY = "this endpoint takes text; pictures are parts of a chat"


def check_names(
    fields: Mapping[str, Any],
    honoured: Mapping[str, Any],
    refused: Mapping[str, tuple[str, tuple[Any, ...]]],
    prefix: str,
) -> None:
    """Refuse unknown fields, and those of `refused` whose value asks for something.

    Args:
        fields: The fields of a request.
        honoured: Names that are read.
        refused: Reasons by name, each with the values that ask for nothing; null always does.
        prefix: Beginning of the names in errors.

    Raises:
        FieldRefused: the first one.
    """
    for name, value in fields.items():
        if name in honoured:
            continue
        if name not in refused:
            raise FieldRefused(prefix + printable(name), "is not a field of this endpoint", code="unknown_parameter")
        why, neutral = refused[name]
        if value is not None and not is_one_of(value, neutral):
            raise FieldRefused(prefix + name, why, code="unsupported_parameter")


def renamed(refused: Refused, names: Mapping[str, str]) -> Refused:
    """An error about a completion, with the client's name for the field.

    Args:
        refused: The error.
        names: Name at the endpoint for each field of a completion; others stay.
    """
    if refused.param is None:
        return refused
    for ours, theirs in names.items():
        rest = path_within(refused.param, ours)
        if rest is not None:
            return refused.renamed(theirs + rest)
    return refused


def integer(fields: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    """A field with an integer. Raises `FieldRefused`."""
    value = fields.get(name)
    return default if value is None else values.integer(name, value, low, high)
