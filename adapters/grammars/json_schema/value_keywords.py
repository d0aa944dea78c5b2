"""Keywords of values: types, listed values, numbers and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.grammars.json_schema.decimals import Bound, Numbers, complements, exact, single, without
from adapters.grammars.json_schema.documents import shown
from adapters.grammars.json_schema.formats import format_language
from adapters.grammars.json_schema.patterns import NOTHING, Language, alt, complement, of_length, text
from adapters.grammars.json_schema.readings import cannot_deny, list_of, number_of, pattern_of, size_of, writable
from adapters.grammars.json_schema.shapes import (
    FALSE,
    TOP,
    TRUE,
    Booleans,
    Goal,
    Items,
    Members,
    Null,
    Others,
    SchemaRefused,
    Shape,
    Shapes,
    Texts,
    instead,
    union,
)
from adapters.grammars.json_schema.solver import Rule, Solver

_TYPES: Mapping[str, Shapes] = {
    "null": (Null(),),
    "boolean": (Booleans(),),
    "integer": (Numbers(step=exact(1)),),
    "number": (Numbers(),),
    "string": (Texts(),),
    "array": (Items(),),
    "object": (Members(),),
}

_VALUE_WORK = 5
"""Work for a value that is no text, or is excluded."""


def _type(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            raise SchemaRefused(f"{place}: expected the names of types, got {shown(schema['type'])}")
    found = union(shape for name in dict.fromkeys(names) for shape in _TYPES[name])
    if holds:
        return found
    kinds = {type(shape) for shape in found}
    left = tuple(shape for shape in TOP if type(shape) not in kinds)
    return (*left, Numbers(fractional=True)) if "integer" in names and "number" not in names else left


def _const(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    return _one_of_values(solver, [schema["const"]], place, holds)


def _enum(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    return _one_of_values(solver, list_of(schema["enum"], place), place, holds)


def _one_of_values(solver: Solver, values: list[Any], place: str, holds: bool) -> Shapes:
    solver.count(place, sum(1 if isinstance(value, str) and holds else _VALUE_WORK for value in values))
    if holds:
        texts = tuple(dict.fromkeys(writable(value, place) for value in values if isinstance(value, str)))
        found = [_value(solver, value, place) for value in values if not isinstance(value, str)]
        return union([*found, *([Texts(values=texts)] if texts else [])])
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    found_shapes: Shapes = TOP
    if texts:
        found_shapes = instead([Texts(complement(alt(map(text, texts))))], Texts)
    for value in values:
        if not isinstance(value, str):
            found_shapes = solver.meet(found_shapes, _all_but(solver, value, place), place)
    return found_shapes


def _value(solver: Solver, value: Any, place: str) -> Shape:
    """The shape of one value, which is no text."""
    if value is None:
        return Null()
    if isinstance(value, bool):
        return Booleans(frozenset({value}))
    if isinstance(value, list):
        goals = tuple(_const_goal(solver, item, place) for item in value)
        return Items(goals, FALSE, len(goals), len(goals))
    if isinstance(value, dict):
        names = tuple((writable(name, place), _const_goal(solver, each, place)) for name, each in value.items())
        return Members(names, (Others((), FALSE),), tuple(value))
    return single(number_of(value, place))


def _const_goal(solver: Solver, value: Any, place: str, holds: bool = True) -> Goal:
    return ((solver.document.derived({"const": value}, place), holds),)


def _all_but(solver: Solver, value: Any, place: str) -> Shapes:
    shape = _value(solver, value, place)
    found = list[Shape]()
    if isinstance(shape, Booleans):
        found = [Booleans(frozenset({not value}))]
    elif isinstance(shape, Numbers):
        found += without(Numbers(), number_of(value, place))
    elif isinstance(shape, Items):
        solver.count(place, len(value) ** 2 // 2)  # an array for each item that may differ, as long as its place
        found = [Items(high=len(value) - 1)] if value else []
        found.append(Items(low=len(value) + 1))
        for index, item in enumerate(value):
            wrong = _const_goal(solver, item, place, False)
            found.append(Items((*[TRUE] * index, wrong), low=index + 1))
    elif isinstance(shape, Members):
        found = [Members(beyond=(frozenset(value),))]
        for name, each in value.items():
            found.append(Members(((name, FALSE),)))
            found.append(Members(((name, _const_goal(solver, each, place, False)),), required=(name,)))
    return instead(found, type(shape))


def _minimum(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    is_open = schema.get("exclusiveMinimum") is True
    return _numbers(Numbers(low=Bound(number_of(schema["minimum"], place), is_open)), place, holds)


def _maximum(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    is_open = schema.get("exclusiveMaximum") is True
    return _numbers(Numbers(high=Bound(number_of(schema["maximum"], place), is_open)), place, holds)


def _exclusive_minimum(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    if isinstance(schema["exclusiveMinimum"], bool):  # draft 4: part of minimum
        return TOP if holds else ()
    return _numbers(Numbers(low=Bound(number_of(schema["exclusiveMinimum"], place), True)), place, holds)


def _exclusive_maximum(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    if isinstance(schema["exclusiveMaximum"], bool):
        return TOP if holds else ()
    return _numbers(Numbers(high=Bound(number_of(schema["exclusiveMaximum"], place), True)), place, holds)


def _multiple_of(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    step = abs(number_of(schema["multipleOf"], place))
    if not step:
        raise SchemaRefused(f"{place}: expected a number above 0")
    return _numbers(Numbers(step=step), place, holds)


def _min_length(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    low = size_of(schema["minLength"], place)
    return _texts(of_length(low, None), holds) if low else (TOP if holds else ())


def _max_length(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    return _texts(of_length(0, size_of(schema["maxLength"], place)), holds)


def _pattern(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    return _texts(pattern_of(schema["pattern"], place), holds)


def _format(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    types = schema.get("type", "string")
    if "string" not in (types if isinstance(types, list) else [types]):
        return TOP if holds else ()  # formats are of texts
    language = format_language(schema["format"]) if isinstance(schema["format"], str) else None
    if language is None:
        raise SchemaRefused(f"{place}: unknown format {shown(schema['format'])}, expected a pattern")
    return _texts(language, holds)


def _numbers(numbers: Numbers, place: str, holds: bool) -> Shapes:
    if holds:
        return instead([numbers], Numbers)
    found = complements(numbers)
    return tuple(found) if found is not None else cannot_deny(place)


def _texts(language: Language, holds: bool) -> Shapes:
    language = language if holds else complement(language)
    found = [] if language is NOTHING else [Texts(language)]
    return instead(found, Texts) if holds else tuple(found)


VALUE_KEYWORDS: Mapping[str, Rule] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "minimum": _minimum,
    "maximum": _maximum,
    "exclusiveMinimum": _exclusive_minimum,
    "exclusiveMaximum": _exclusive_maximum,
    "multipleOf": _multiple_of,
    "minLength": _min_length,
    "maxLength": _max_length,
    "pattern": _pattern,
    "format": _format,
}
"""The rule of each keyword; those of one rule say one thing together."""
