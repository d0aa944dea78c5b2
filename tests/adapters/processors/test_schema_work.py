"""Work for a JSON Schema grows as the schema does, whatever is in it, or it is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from growth import num_lines, peak_bytes

from adapters.catalog import Catalog, Requested, Selection, SelectionError, catalog
from adapters.contract import ArgumentError
from adapters.grammars import kept
from adapters.grammars.json_schema import (
    SchemaRefused,
    ecma,
    emission,
    lark_grammar,
    patterns,
    solver,
)
from adapters.processors.tool_calls import Tool, ToolCalls
from adapters.testing.kit_model import kit_context

GROWN = 3
"""Times the work of a schema of half the size: 2 where it grows as the schema does."""


def referring(definition: Any, count: int) -> dict[str, Any]:
    """A schema that refers to a definition from so many places."""
    properties = {f"p{i}": {"$ref": "#/$defs/d", "title": ""} for i in range(count)}
    return {"$defs": {"d": definition}, "properties": properties}


def characters(count: int, first: int) -> str:
    """A set of so many characters, no two of which are neighbours."""
    return "".join(chr(first + 2 * i) for i in range(count))


LINES: dict[str, tuple[int, Callable[[int], Any]]] = {
    "alternatives without a value": (700, lambda n: {"oneOf": [False] * n}),
    "sets of characters": (
        100,
        lambda n: {"allOf": [{"pattern": f"^[{characters(n, 0x100 + first)}]$"} for first in (0, 1)]},
    ),
    "references to listed values": (150, lambda n: referring({"enum": [f"v{i}" for i in range(n)]}, n)),
    "references to multiples": (
        150,
        lambda n: referring({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 7 * n}, n),
    ),
}

BEYOND: dict[str, Any] = {
    "characters that may be left out": {
        "allOf": [{"pattern": "^" + "?".join(characters(200, 0x100)) + f"?{end}$"} for end in "ab"]
    },
    "texts of a pattern": {
        "pattern": f"^{'.?' * 150}(?:{'|'.join(characters(800, 0x100))})?$",
        "enum": [*characters(400, 0x1000)],
    },
    "lists of multiples": {
        "items": [{"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 9000 + 7 * i} for i in range(40)]
    },
    "distinct items": {
        "items": [{"uniqueItems": True, "items": {"enum": [8 * i + k for k in range(8)]}} for i in range(20)]
    },
    "classes of characters": {"items": [{"pattern": "^[" + r"\P{L}" * 200 + f"]{i}$"} for i in range(20)]},
    "classes in sets": {
        "items": [
            {"pattern": "^" + "".join(rf"[\p{{L}}{each}]" for each in characters(40, 0x2000 + 80 * i)) + "$"}
            for i in range(30)
        ]
    },
    "ways through patterns": {"items": [{"pattern": "(^|a)" * 7 + f"b{i}"} for i in range(20)]},
}
"""Schemas that take more than a hundredth of the work that there is for one."""

MOST_LINES = 30
"""Lines of Python for a part of that work."""

BYTES: dict[str, tuple[int, Callable[[int], Any]]] = {
    "a list that is not to be": (1000, lambda n: {"not": {"const": [0] * n}}),
    "items of which one is wrong": (1000, lambda n: {"not": {"prefixItems": [{"minimum": i} for i in range(n)]}}),
    "items of which one is contained": (
        1000,
        lambda n: {"prefixItems": [{"minimum": i} for i in range(n)], "contains": {"type": "null"}},
    ),
    "a long name": (
        500,
        lambda n: {"properties": {"k" * 20 * n: {"properties": {f"p{i}": {"type": "null"} for i in range(n)}}}},
    ),
    "a long id": (
        500,
        lambda n: {"$id": f"x:/{'k' * 20 * n}", "$defs": {f"d{i}": {"$anchor": f"a{i}"} for i in range(n)}},
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_work_grow_as_the_schema(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are a hundredth of the real ones, so that small schemas are beyond them."""
    for limited_work in (solver, emission, patterns):
        monkeypatch.setattr(limited_work, "MAX_WORK", limited_work.MAX_WORK // 100)
    count, schema = LINES[name]
    small, large = (num_lines(partial(lark_grammar, schema(size))) for size in (count, 2 * count))
    assert large < GROWN * small


@pytest.mark.parametrize("name", BEYOND)
def test_work_ends_at_the_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of 4 KB took 44 s: what is done with each part of a pattern was not counted."""
    for limited_work in (solver, emission, patterns):
        monkeypatch.setattr(limited_work, "MAX_WORK", limited_work.MAX_WORK // 100)
    with pytest.raises(SchemaRefused, match=r"too complex|too many cases"):
        lark_grammar(BEYOND[name])
    clear_kept()
    assert num_lines(partial(lark_grammar, BEYOND[name])) < MOST_LINES * emission.MAX_WORK


def clear_kept() -> None:
    """Forget what is known of languages."""
    for known in (ecma._searched, patterns._emptiness, patterns._successors, patterns.derivative, patterns.is_nullable):
        known.cache_clear()


@pytest.mark.parametrize("name", BYTES)
def test_memory_grows_as_the_schema(name: str) -> None:
    count, schema = BYTES[name]
    small, large = (peak_bytes(partial(lark_grammar, schema(size))) for size in (count, 2 * count))
    assert large < GROWN * small


def test_ways_through_a_pattern_are_few() -> None:
    with pytest.raises(SchemaRefused, match="#/pattern: has too many groups"):
        lark_grammar({"pattern": "(^|a)" * 8 + "b" * 1000})
    assert lark_grammar({"pattern": "(^|a)" * 4 + "b" * 1000})


@pytest.mark.parametrize(
    "schema",
    [
        referring({"properties": {f"a{i}": {} for i in range(100)}}, 200),
        referring({"prefixItems": [{}] * 100}, 200),
        {"allOf": [*({"additionalProperties": {"minimum": i}} for i in range(100)), {"required": list("abcdef" * 40)}]},
    ],
    ids=["members", "items", "required"],
)
def test_what_many_places_refer_to_counts_at_each(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lark_grammar(schema)
    monkeypatch.setattr(emission, "MAX_WORK", 500)
    with pytest.raises(SchemaRefused, match="too many cases"):
        lark_grammar(schema)


def test_a_long_place_is_shown_by_its_ends() -> None:
    with pytest.raises(SchemaRefused) as raised:
        lark_grammar({"properties": {"k" * 1000: {"properties": {"a": {"type": "any"}}}}})
    message = str(raised.value)
    assert message.startswith("#/properties/kkk")
    assert "/properties/a/type: expected the names of types" in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("//[#/a", r"#/\$ref: expected a reference, got"),
        ("#/prefixItems/²", r"#/\$ref: there is no"),
        (f"#/prefixItems/{'9' * 5000}", r"#/\$ref: there is no"),
    ],
    ids=["no address", "no digit", "many digits"],
)
def test_a_reference_to_nothing_is_refused(reference: str, said: str) -> None:
    with pytest.raises(SchemaRefused, match=said):
        lark_grammar({"prefixItems": [{}], "$ref": reference})


def test_an_id_that_is_no_address_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="#: expected an id, got"):
        lark_grammar({"$id": "//[x#", "type": "object"})


def test_the_schemas_of_a_request_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a hundred tools was allowed a second of work."""
    monkeypatch.setattr(kept, "MAX_WORK_OF_ALL", 3000)
    hard = {"allOf": [{"enum": [f"v{i}" for i in range(40)]}, {"pattern": "^v[0-9]*$"}]}
    schema = {"type": "object", "properties": {"a": hard}}
    tools = [Tool(name=f"f{i}", parameters={**schema, "$comment": str(i)}) for i in range(40)]
    context = kit_context()
    assert ToolCalls(ToolCalls.Args(format="hermes", tools=tools[:1]), context)
    with pytest.raises(ArgumentError, match=r"tools\[.*too"):
        ToolCalls(ToolCalls.Args(format="hermes", tools=tools), context)


def test_the_schemas_of_a_selection_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is compiled, and as often as it is sent: what was kept of it counts again."""
    monkeypatch.setattr(catalog, "MAX_WORK_OF_ALL", 3000)
    hard = {"allOf": [{"enum": [f"v{i}" for i in range(40)]}, {"pattern": "^v[0-9]*$"}]}

    def grammars(count: int) -> int:
        schemas = ({"properties": {"a": hard}, "$comment": str(i)} for i in range(count))
        named = [
            Requested("json_schema", {"schema": schema}, path=f"processors[{i}]") for i, schema in enumerate(schemas)
        ]
        return len(Catalog.default().grammars(Selection(tuple(named)), kit_context()))

    assert grammars(1) == 1
    for _ in range(5):
        with pytest.raises(
            SelectionError, match=r"processors\[\d+\].args.schema: .*too (many cases|complex, together)"
        ):
            grammars(16)


def test_a_hard_pattern_gives_way_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for Python's lock, as the thread of an engine's steps does, soon gets it."""
    pauses = list[float]()
    monkeypatch.setattr(patterns, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(patterns, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    counted = "^(?=(?:[gw]|h)*g(?:[gw]|h){5}$)(?:[gw]|h)*$"
    lark_grammar({"type": "string", "allOf": [{"pattern": counted}, {"maxLength": 40}]})
    assert len(pauses) > 50
    assert set(pauses) == {patterns.PAUSE_S}
