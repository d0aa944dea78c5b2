"""Keywords of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from adapters.grammars.json_schema.documents import inside
from adapters.grammars.json_schema.patterns import ANYTHING, Language, alt, matches
from adapters.grammars.json_schema.readings import (
    cannot_deny,
    denied,
    list_of,
    map_of,
    names_of,
    pattern_of,
    size_of,
    writable,
)
from adapters.grammars.json_schema.shapes import (
    FALSE,
    TOP,
    TRUE,
    Goal,
    Members,
    Others,
    SchemaRefused,
    Shapes,
    Texts,
    instead,
    joined,
    union,
)
from adapters.grammars.json_schema.solver import Rule, Solver

_CONDITIONAL = frozenset({"anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"})
"""Keywords beside which other members are evaluated from value to value."""


def _properties(solver: Solver, schema: dict[str, Any], _: str, place: str, holds: bool) -> Shapes:
    named, patterns = _named(solver, schema, place), _patterns(solver, schema, place)
    rest = solver.goal(schema.get("additionalProperties", True), inside(place, "additionalProperties"))
    if not holds:
        return _wrong_member(solver, named, patterns, rest, place)
    names = [(n, joined([goal, *(more for p, more in patterns if matches(p, n))])) for n, goal in named]
    others = (Others(patterns, rest),) if patterns or rest != TRUE else ()
    return instead([Members(tuple(names), others)], Members)


def _named(solver: Solver, schema: dict[str, Any], place: str) -> tuple[tuple[str, Goal], ...]:
    place = inside(place, "properties")
    found = map_of(schema.get("properties", {}), place)
    return tuple((writable(name, place), solver.goal(each, inside(place, name))) for name, each in found.items())


def _patterns(solver: Solver, schema: dict[str, Any], place: str) -> tuple[tuple[Language, Goal], ...]:
    place = inside(place, "patternProperties")
    found = map_of(schema.get("patternProperties", {}), place)
    return tuple(
        (pattern_of(pattern, inside(place, pattern)), solver.goal(each, inside(place, pattern)))
        for pattern, each in found.items()
    )


def _wrong_member(
    solver: Solver,
    named: Iterable[tuple[str, Goal]],
    patterns: tuple[tuple[Language, Goal], ...],
    rest: Goal,
    place: str,
) -> Shapes:
    named = tuple(named)
    found = [Members(((n, denied(goal)),), required=(n,)) for n, goal in named if goal != TRUE]
    if any(goal != TRUE for _, goal in patterns) or (patterns and rest != TRUE) or rest not in (TRUE, FALSE):
        cannot_deny(inside(place, "patternProperties" if patterns else "additionalProperties"))
    if rest == FALSE:
        found.append(Members(beyond=(frozenset(name for name, _ in named),)))
    return tuple(found)


def _required(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    if isinstance(schema["required"], bool):  # draft 3, and a frequent mistake
        raise SchemaRefused(f"{place}: expected a list of names")
    names = names_of(schema["required"], place)
    if holds:
        return instead([Members(required=names)], Members)
    return tuple(Members(((name, FALSE),)) for name in names)


def _min_properties(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    low = size_of(schema["minProperties"], place)
    return instead([Members(low=low)], Members) if holds else ((Members(high=low - 1),) if low else ())


def _max_properties(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    high = size_of(schema["maxProperties"], place)
    return instead([Members(high=high)], Members) if holds else (Members(low=high + 1),)


def _property_names(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    if not holds:
        cannot_deny(place)
    shapes = solver.shapes(solver.goal(schema["propertyNames"], place))
    languages = [shape.as_language() for shape in shapes if isinstance(shape, Texts)]
    keys = alt(languages)
    return TOP if keys is ANYTHING else instead([Members(keys=(keys,))], Members)


def _dependent(keyword: str, solver: Solver, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
    """If there is a member, the others or the schema that it needs."""
    found = TOP if holds else ()
    for name, needed in map_of(schema[keyword], place).items():
        there = (Members(required=(writable(name, place),)),)
        if isinstance(needed, list):
            goal: Goal = ((solver.document.derived({"required": needed}, inside(place, name)), holds),)
        else:
            goal = solver.goal(needed, inside(place, name), holds)
        needs = solver.meet(there, solver.shapes(goal), outer)
        if holds:
            absent = Members(((name, FALSE),))
            found = solver.meet(found, instead([absent, *needs], Members), outer)
        else:
            found = union([*found, *needs])
    return found


def _unevaluated_properties(solver: Solver, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
    if not holds:
        cannot_deny(place)
    goal = solver.goal(schema["unevaluatedProperties"], place)
    if goal == TRUE:
        return TOP
    named, patterns = dict[str, Goal](), dict[Language, Goal]()
    if _evaluates_all(solver, schema, place, outer, named, patterns, set()):
        return TOP
    return instead([Members(tuple(named.items()), (Others(tuple(patterns.items()), goal),))], Members)


def _evaluates_all(
    solver: Solver,
    schema: Any,
    place: str,
    outer: str,
    named: dict[str, Goal],
    patterns: dict[Language, Goal],
    seen: set[int],
) -> bool:
    """Collect the members that a schema evaluates; whether that is all of them."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    seen.add(id(schema))
    for keyword in _CONDITIONAL.intersection(schema):
        raise SchemaRefused(f"{place}: cannot be enforced beside {keyword}")
    named.update(dict.fromkeys(map_of(schema.get("properties", {}), outer), TRUE))
    patterns.update(dict.fromkeys((p for p, _ in _patterns(solver, schema, outer)), TRUE))
    found = "additionalProperties" in schema
    inner = list(list_of(schema.get("allOf", []), outer))
    if "$ref" in schema:
        inner.append(solver.document.schema(solver.document.target(schema, "$ref", outer)))
    for each in inner:
        found |= _evaluates_all(solver, each, place, outer, named, patterns, seen)
        found |= isinstance(each, dict) and "unevaluatedProperties" in each
    return found


OBJECT_KEYWORDS: Mapping[str, Rule] = {
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _properties,
    "required": _required,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated_properties,
    **{keyword: partial(_dependent, keyword) for keyword in ("dependencies", "dependentRequired", "dependentSchemas")},
}
"""The rule of each keyword; those of one rule say one thing together."""
