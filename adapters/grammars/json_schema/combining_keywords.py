"""Keywords that combine schemas: unions, intersections, negations, conditions and references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

from adapters.grammars.json_schema.documents import inside
from adapters.grammars.json_schema.readings import list_of
from adapters.grammars.json_schema.shapes import TOP, Shape, Shapes, union
from adapters.grammars.json_schema.solver import Rule, Solver


def _all_of(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    parts = _parts(solver, schema["allOf"], place)
    return _all(solver, parts, place, True) if holds else _any(solver, parts, False)


def _any_of(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    parts = _parts(solver, schema["anyOf"], place)
    return _any(solver, parts, True) if holds else _all(solver, parts, place, False)


def _parts(solver: Solver, schemas: Any, place: str) -> list[int]:
    return [
        solver.document.number(schema, inside(place, index)) for index, schema in enumerate(list_of(schemas, place))
    ]


def _any(solver: Solver, numbers: Iterable[int], holds: bool) -> Shapes:
    return union(shape for number in numbers for shape in solver.shapes_of((number, holds)))


def _all(solver: Solver, numbers: Iterable[int], place: str, holds: bool) -> Shapes:
    found = TOP
    for number in numbers:
        found = solver.meet(found, solver.shapes_of((number, holds)), place)
    return found


def _one_of(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    parts = _parts(solver, schema["oneOf"], place)
    shapes = [solver.shapes_of((number, True)) for number in parts]
    overlapping = list[tuple[int, int]]()
    for one, other in combinations(range(len(parts)), 2):
        solver.count(place, max(1, len(shapes[one]) * len(shapes[other])))
        if not solver.are_disjoint(shapes[one], shapes[other]):
            overlapping.append((one, other))
    if not holds:
        two = [solver.meet(shapes[one], shapes[other], place) for one, other in overlapping]
        return union([*_all(solver, parts, place, False), *(shape for each in two for shape in each)])
    beside = defaultdict[int, list[int]](list)
    for one, other in overlapping:
        beside[one].append(other)
        beside[other].append(one)
    found = list[Shape]()
    for index, alone in enumerate(shapes):
        for other in beside[index]:
            alone = solver.meet(alone, solver.shapes_of((parts[other], False)), place)
        found += alone
    return union(found)


def _not(solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    number = solver.document.number(schema["not"], place)
    if number == 0:
        return () if holds else TOP
    return solver.shapes_of((number, not holds))


def _if(solver: Solver, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
    if "then" not in schema and "else" not in schema:
        return TOP if holds else ()
    condition = solver.document.number(schema["if"], place)
    found = list[Shape]()
    for keyword, met in (("then", True), ("else", False)):
        number = solver.document.number(schema.get(keyword, True), inside(outer, keyword))
        when = solver.shapes_of((condition, met))
        found += solver.meet(when, solver.shapes_of((number, holds)), place)
    return union(found)


def _reference(keyword: str, solver: Solver, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
    return solver.shapes_of((solver.document.target(schema, keyword, place), holds))


COMBINING_KEYWORDS: Mapping[str, Rule] = {
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **{keyword: partial(_reference, keyword) for keyword in ("$ref", "$dynamicRef", "$recursiveRef")},
}
"""The rule of each keyword; those of one rule say one thing together."""
