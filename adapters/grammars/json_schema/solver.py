"""Shapes of the schemas of a document, and proofs that a goal has no value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from adapters.grammars.json_schema.documents import SchemaDocument, inside
from adapters.grammars.json_schema.intersections import meet_shapes, size_of
from adapters.grammars.json_schema.shapes import (
    FALSE,
    TOP,
    TRUE,
    Goal,
    Items,
    Literal,
    Members,
    SchemaRefused,
    Shape,
    Shapes,
    count_cases,
    joined,
    union,
)

MAX_WORK = 200_000
"""Intersections of two shapes, values or members, for one document: about a second."""

MAX_SHAPES = 2_000
"""Shapes of one schema."""

_PROOF_DEPTH = 4
"""Levels of values inside values that a proof looks at, that nothing has a goal."""

_REFUSED = frozenset({"unevaluatedItems", "maxContains"})

Constraint: TypeAlias = Callable[[bool], Shapes]
"""The shapes of what a keyword allows, or of what it rules out."""

Rule: TypeAlias = "Callable[[Solver, dict[str, Any], str, str, bool], Shapes]"
"""A function from a schema that has a keyword, the keyword's place, the schema's place, and whether
the keyword holds or does not, to the shapes that are left.
"""


class _Endless(SchemaRefused):
    """A schema that refers to itself while its shapes are being found."""


class Solver:
    """The shapes of the schemas of one document.

    Args:
        document: The document.
        rules: Rule of each keyword.
    """

    def __init__(self, document: SchemaDocument, rules: Mapping[str, Rule]) -> None:
        self.document, self._rules = document, rules
        self._constraining = {*rules, *_REFUSED, "x-guidance"}
        self._found: dict[Literal, Shapes] = {}
        self._open = set[Literal]()
        self._goals: dict[Goal, Shapes] = {TRUE: TOP, FALSE: ()}
        self._proved: dict[Goal, bool] = {TRUE: False, FALSE: True}
        self._work = 0

    # --- goals

    def goal(self, schema: Any, place: str, holds: bool = True) -> Goal:
        """The goal that ``schema`` holds, or does not."""
        if schema is False:
            return FALSE if holds else TRUE
        number = self._referred(self.document.number(schema, place))
        return ((number, holds),) if number else (TRUE if holds else FALSE)

    def _referred(self, number: int) -> int:
        """Number of the schema that a schema leads to if a reference is all that it says, so that
        all such references are one goal.
        """
        seen = set[int]()
        while number not in seen and self._is_reference(self.document.schema(number)):
            seen.add(number)
            with suppress(SchemaRefused):  # as it will be where its values are looked at
                place = inside(self.document.place(number), "$ref")
                number = self.document.target(self.document.schema(number), "$ref", place)
        return number

    def _is_reference(self, schema: Any) -> bool:
        return schema is not True and "$ref" in schema and self._constraining.isdisjoint(schema.keys() - {"$ref"})

    def shapes(self, goal: Goal) -> Shapes:
        """The values that meet ``goal``.

        Raises:
            SchemaRefused: a schema of it cannot be enforced.
        """
        found = self._goals.get(goal)
        if found is None:
            found = TOP
            for literal in goal:
                found = self.meet(found, self.shapes_of(literal), self.document.place(literal[0]))
            self._goals[goal] = found
        return found

    def is_impossible(self, goal: Goal, depth: int = _PROOF_DEPTH) -> bool:
        """Whether it is plain that no value meets ``goal``."""
        proved = self._proved.get(goal)
        if proved is None and depth > 0:
            try:
                proved = all(self._is_impossible_shape(shape, depth) for shape in self.shapes(goal))
            except _Endless:  # a schema that is being read right now
                return False
            self._proved[goal] = proved
        return bool(proved)

    def _is_impossible_shape(self, shape: Shape, depth: int) -> bool:
        if isinstance(shape, Members):
            goals = dict(shape.names)
            return any(self.is_impossible(goals.get(name, TRUE), depth - 1) for name in shape.required)
        if isinstance(shape, Items):
            return any(self.is_impossible(shape.item(index), depth - 1) for index in range(min(shape.low, 64)))
        return False

    # --- schemas

    def shapes_of(self, literal: Literal) -> Shapes:
        """The values of a schema, or of its negation."""
        found = self._found.get(literal)
        if found is not None:
            return found
        number, holds = literal
        place = self.document.place(number)
        if literal in self._open:
            raise _Endless(f"{place}: refers to itself without an end")
        self._open.add(literal)
        try:
            found = self._found[literal] = self._read(self.document.schema(number), place, holds)
        finally:
            self._open.discard(literal)
        return found

    def _read(self, schema: Any, place: str, holds: bool) -> Shapes:
        constraints = [] if schema is True else self._constraints(schema, place)
        if not holds:
            return union(shape for constraint in constraints for shape in constraint(False))
        found = TOP
        for constraint in constraints:
            found = self.meet(found, constraint(True), place)
        return found

    def _constraints(self, schema: dict[str, Any], place: str) -> Iterator[Constraint]:
        """Constraints of the keywords of a schema, types first, the others in their order."""
        done = set[Rule]()
        for keyword in sorted(schema, key=lambda keyword: keyword != "type"):
            if keyword in _REFUSED:
                raise SchemaRefused(f"{inside(place, keyword)}: cannot be enforced")
            if keyword == "x-guidance" and place != "#":
                raise SchemaRefused(f"{inside(place, keyword)}: is no part of a schema inside another one")
            rule = self._rules.get(keyword)
            if rule is not None and rule not in done:
                done.add(rule)
                yield partial(rule, self, schema, inside(place, keyword), place)

    # --- intersections

    def meet(self, left: Shapes, right: Shapes, place: str) -> Shapes:
        """The values that are in both."""
        if left == TOP or right == TOP:
            return right if left == TOP else left
        found, of_type = list[Shape](), defaultdict[type[Shape], list[Shape]](list)
        for other in right:
            of_type[type(other)].append(other)
        for one in left:
            for other in of_type[type(one)]:
                self.count(place, size_of(one) + size_of(other))
                both_shapes = meet_shapes(one, other, place, self.is_impossible)
                if both_shapes is not None:
                    found.append(both_shapes)
        shapes = union(found)
        if len(shapes) > MAX_SHAPES:
            raise SchemaRefused(f"{place}: has more than {MAX_SHAPES} cases")
        return shapes

    def count(self, place: str, work: int) -> None:
        """Count ``work``, of which there is `MAX_WORK`."""
        self._work += work
        count_cases(work)
        if self._work > MAX_WORK:
            raise SchemaRefused(f"{place}: the schema has too many cases")

    def are_disjoint(self, left: Shapes, right: Shapes) -> bool:
        """Whether it is plain that no value is in both."""
        return all(
            type(one) is not type(other) or self._is_disjoint_shape(one, other) for one in left for other in right
        )

    def _is_disjoint_shape(self, left: Shape, right: Shape) -> bool:
        if isinstance(left, Members) and isinstance(right, Members):
            mine, theirs = dict(left.names), dict(right.names)
            for name in dict.fromkeys([*left.required, *right.required]):
                goals = [shape.get(name, other.value(name)) for shape, other in ((mine, left), (theirs, right))]
                if self.is_impossible(joined(goals)):
                    return True
            return False
        met = meet_shapes(left, right, "#", self.is_impossible)
        return met is None or self._is_impossible_shape(met, _PROOF_DEPTH)
