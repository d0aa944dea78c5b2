"""A schema document: its schemas by number, their places, and the targets of references."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from adapters.grammars.json_schema.shapes import SchemaRefused

MAX_DEPTH = 128
"""Levels of a document."""

_DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords whose values are data, in which nothing is a schema."""

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose values hold schemas by name."""

MAX_ADDRESS = 2_048
"""Characters of an address that references are relative to: each of them is joined with it."""

_SHOWN = 48

_INDEX = re.compile("[0-9]{1,9}")

_PLACE = 256
"""Characters of a place that is shown whole. Each schema keeps its own, which begins with that of
the schema that it is in.
"""


class SchemaDocument:
    """A document, whose schemas are numbered as they are read; schema 0 is ``true``.

    Args:
        root: The document.

    Raises:
        SchemaRefused: it is nested too deeply, or of a draft before the fourth.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        declared = root.get("$schema") if isinstance(root, dict) else None
        if isinstance(declared, str) and any(f"draft-0{draft}" in declared for draft in range(4)):
            raise SchemaRefused("#/$schema: expected draft 4 or a later one, whose keywords are enforced")
        self._id_key = "id" if isinstance(declared, str) and "draft-04" in declared else "$id"
        self._schemas: list[Any] = [True]
        self._places = ["#"]
        self._numbers: dict[int, int] = {}
        self._base_of: dict[int, str] = {}
        self._targets: dict[tuple[str, str], Any] = {}  # by address and fragment
        self._dynamic: dict[str, list[Any]] = {}
        self._kept: list[Any] = []
        for schema, base in _resources(root, self._id_key):
            self._base_of[id(schema)] = base
            self._name(schema, base)
        self._targets.setdefault(("", ""), root)

    def _name(self, schema: dict[str, Any], base: str) -> None:
        if _own_id(schema, self._id_key) is not None or schema is self._root:
            self._targets.setdefault((base, ""), schema)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._targets.setdefault((base, schema[key]), schema)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(schema)
        plain = schema.get(self._id_key)
        if isinstance(plain, str) and plain.startswith("#") and len(plain) > 1:
            self._targets.setdefault((base, plain[1:]), schema)

    def number(self, schema: Any, place: str) -> int:
        """Number of ``schema``, which is at ``place``.

        Raises:
            SchemaRefused: it is no schema.
        """
        if schema is True or schema == {}:
            return 0
        if schema is not False and not isinstance(schema, dict):
            raise SchemaRefused(f"{place}: expected a schema, got {shown(schema)}")
        if schema is False:
            schema = {"not": True}
            self._kept.append(schema)
        found = self._numbers.get(id(schema))
        if found is None:
            found = self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append(schema)
            self._places.append(place)
        return found

    def derived(self, schema: dict[str, Any], place: str) -> int:
        """Number of a schema that is derived from the document."""
        self._kept.append(schema)
        return self.number(schema, place)

    def schema(self, number: int) -> Any:
        """A schema by its number."""
        return self._schemas[number]

    def place(self, number: int) -> str:
        """JSON pointer of a schema, as a fragment."""
        return self._places[number]

    def target(self, schema: dict[str, Any], keyword: str, place: str) -> int:
        """Number of the schema that a reference leads to.

        Args:
            schema: Schema that has the reference.
            keyword: ``$ref``, ``$dynamicRef`` or ``$recursiveRef``.
            place: Place of the reference, for errors.

        Raises:
            SchemaRefused: the document has no such schema, or the reference may lead to several.
        """
        reference = schema[keyword]
        if not isinstance(reference, str):
            raise SchemaRefused(f"{place}: expected a text, got {shown(reference)}")
        try:
            address = _joined(self._base_of.get(id(schema), ""), reference)
            base, fragment = urldefrag(address)
        except ValueError:
            raise SchemaRefused(f"{place}: expected a reference, got {shown(reference)}") from None
        if keyword != "$ref" and (
            len(self._dynamic.get(fragment, ())) > 1 or (keyword == "$recursiveRef" and self._num_resources > 1)
        ):
            raise SchemaRefused(f"{place}: may lead to several schemas")
        if fragment and not fragment.startswith("/"):
            target = self._targets.get((base, fragment), _NONE)
        else:
            target = self._pointed(self._targets.get((base, ""), _NONE), fragment)
        if target is _NONE:
            raise SchemaRefused(f"{place}: there is no {shown(reference)} in this document")
        return self.number(target, inside(address if base else f"#{fragment}"))

    @cached_property
    def _num_resources(self) -> int:
        return len({id(target) for (_, fragment), target in self._targets.items() if not fragment})

    def _pointed(self, target: Any, pointer: str) -> Any:
        """Value at a JSON pointer (RFC 6901) inside ``target``."""
        for part in unquote(pointer).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and _INDEX.fullmatch(part) and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                return _NONE
        return target


_NONE = object()


def _own_id(schema: dict[str, Any], key: str) -> str | None:
    found = schema.get(key)
    return found if isinstance(found, str) and found and not found.startswith("#") else None


def _joined(base: str, reference: str) -> str:
    """The address of a reference; `urljoin` knows no ``urn:`` that a fragment may belong to."""
    return f"{base}{reference}" if reference.startswith("#") else urljoin(base, reference)


def _address(base: str, own: str) -> str:
    """The address of a schema with an id. Raises `SchemaRefused`."""
    try:
        found = urldefrag(urljoin(base, own))[0]
    except ValueError:
        raise SchemaRefused(f"#: expected an id, got {shown(own)}") from None
    if len(found) > MAX_ADDRESS:
        raise SchemaRefused(f"#: expected ids of at most {MAX_ADDRESS} characters")
    return found


def _resources(root: Any, id_key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every schema of a document, and the address that its references are relative to."""
    waiting = [(root, "", 0, False)]
    while waiting:
        found, base, depth, is_map = waiting.pop()
        if depth > 2 * MAX_DEPTH:
            raise SchemaRefused("#: is nested too deeply")
        if isinstance(found, list):
            waiting += [(each, base, depth + 1, False) for each in found if isinstance(each, dict | list)]
        if isinstance(found, dict):
            if not is_map:
                own = _own_id(found, id_key)
                base = _address(base, own) if own is not None else base
                yield found, base
            for key, each in found.items():
                if isinstance(each, dict | list) and (is_map or key not in _DATA):
                    waiting.append((each, base, depth + 1, not is_map and key in _MAPS))


def shown(value: Any) -> str:
    """JSON of a value of a document, shortened."""
    try:
        found = json.dumps(value)
    except (RecursionError, ValueError):
        found = type(value).__name__
    return found if len(found) <= _SHOWN else found[:_SHOWN] + "…"


def inside(place: str, *parts: str | int) -> str:
    """The place of a part of what is at ``place``; the middle of a long one is left out."""
    found = "/".join([place, *(str(part).replace("~", "~0").replace("/", "~1") for part in parts)])
    return found if len(found) <= _PLACE else f"{found[: _PLACE // 2]}…{found[-_PLACE // 2 :]}"
