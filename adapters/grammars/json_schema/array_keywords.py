"""Keywords of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.grammars.json_schema.documents import inside
from adapters.grammars.json_schema.readings import cannot_deny, denied, list_of, size_of
from adapters.grammars.json_schema.shapes import FALSE, TOP, TRUE, Items, SchemaRefused, Shapes, instead
from adapters.grammars.json_schema.solver import Rule, Solver


def _items(solver: Solver, schema: dict[str, Any], _: str, place: str, holds: bool) -> Shapes:
    tuples, rest_key = "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise SchemaRefused(f"{inside(place, 'items')}: expected a schema beside prefixItems, got a list")
        tuples, rest_key = "items", "additionalItems"
    listed = list_of(schema.get(tuples, []), inside(place, tuples))
    prefix = tuple(solver.goal(item, inside(place, tuples, index)) for index, item in enumerate(listed))
    rest = solver.goal(schema.get(rest_key, True), inside(place, rest_key))
    if holds:
        return instead([Items(prefix, rest)], Items)
    solver.count(inside(place, tuples), len(prefix) ** 2 // 2)  # an array for each wrong item, as long as its place
    found = [Items((*[TRUE] * i, denied(goal)), low=i + 1) for i, goal in enumerate(prefix) if goal != TRUE]
    if rest == FALSE:
        found.append(Items(low=len(prefix) + 1))
    elif rest != TRUE:
        if prefix:
            cannot_deny(inside(place, rest_key))
        found.append(Items(contains=((denied(rest), 1),)))
    return tuple(found)


def _min_items(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    low = size_of(schema["minItems"], place)
    return instead([Items(low=low)], Items) if holds else ((Items(high=low - 1),) if low else ())


def _max_items(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    high = size_of(schema["maxItems"], place)
    return instead([Items(high=high)], Items) if holds else (Items(low=high + 1),)


def _contains(solver: Solver, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
    least = size_of(schema.get("minContains", 1), inside(outer, "minContains"))
    goal = solver.goal(schema["contains"], place)
    if least == 0:
        return TOP if holds else ()
    if holds:
        return instead([Items(contains=((goal, least),))], Items)
    if least > 1:
        cannot_deny(place)
    return (Items(rest=denied(goal)),)


def _unique_items(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    if schema["uniqueItems"] is not True:
        return TOP if holds else ()
    if not holds:
        cannot_deny(place)
    return instead([Items(unique=True)], Items)


ARRAY_KEYWORDS: Mapping[str, Rule] = {
    "prefixItems": _items,
    "items": _items,
    "additionalItems": _items,
    "minItems": _min_items,
    "maxItems": _max_items,
    "contains": _contains,
    "uniqueItems": _unique_items,
}
"""The rule of each keyword; those of one rule say one thing together."""
