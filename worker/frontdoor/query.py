"""Parameters of a request's query."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from urllib.parse import parse_qsl

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import printable


def query_of(target: bytes) -> Mapping[str, str]:
    """The parameters in a request's target, decoded. A list, which has brackets behind its name
    and occurs once for each entry, has commas between its entries.

    Raises:
        FieldRefused: another one occurs twice.
    """
    text = target.partition(b"?")[2].decode("latin-1")
    found: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in found:
            found[name] = value
        elif name.endswith("[]"):
            found[name] += f",{value}"
        else:
            raise FieldRefused(printable(name), "occurs twice in the query")
    return found


def check_query(target: bytes, known: Collection[str]) -> None:
    """Raises `FieldRefused` for a parameter that the path does not have."""
    for name in query_of(target) if b"?" in target else ():
        if name not in known:
            raise FieldRefused(printable(name), "is not a parameter of this path", code="unknown_parameter")


def integer_in(query: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    """A parameter that is an integer within bounds. Raises `FieldRefused`."""
    text = query.get(name)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise FieldRefused(name, f"must be an integer from {least} to {most}, got {printable(text)}")
    return int(text)


def is_descending(query: Mapping[str, str]) -> bool:
    """Whether the parameter ``order`` of a list has the newest first. Raises `FieldRefused`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise FieldRefused("order", f"must be asc or desc, got {printable(order)}")
    return order == "desc"
