"""The shapes of the schemas of a document: goals, intersections, and proofs of emptiness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from adapters.grammars.json_schema.decimals import Numbers
from adapters.grammars.json_schema.decimals import meet as meet_numbers
from adapters.grammars.json_schema.documents import SchemaDocument, inside
from adapters.grammars.json_schema.patterns import TooComplex, both, is_empty
from adapters.grammars.json_schema.shapes import (
    FALSE,
    TOP,
    TRUE,
    Booleans,
    Goal,
    Items,
    Literal,
    Members,
    SchemaRefused,
    Shape,
    Shapes,
    Texts,
    is_top,
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
    """A schema whose meaning is asked for while it is being found."""


class Solver:
    """The shapes of the schemas of one document.

    Args:
        document: The document.
        rules: What each keyword says.
    """

    def __init__(self, document: SchemaDocument, rules: Mapping[str, Rule]) -> None:
        self.document, self._rules = document, rules
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
        number = self.document.number(schema, place)
        return ((number, holds),) if number else (TRUE if holds else FALSE)

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
            except _Endless:  # a schema that is being looked at right now
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
        found = list[Shape]()
        for one in left:
            for other in right:
                if type(one) is type(other):
                    self.count(place, _size_of(one) + _size_of(other))
                    both_shapes = self._meet_shapes(one, other, place)
                    if both_shapes is not None:
                        found.append(both_shapes)
        shapes = union(found)
        if len(shapes) > MAX_SHAPES:
            raise SchemaRefused(f"{place}: has more than {MAX_SHAPES} cases")
        return shapes

    def count(self, place: str, work: int) -> None:
        """Count ``work``, of which there is `MAX_WORK`."""
        self._work += work
        if self._work > MAX_WORK:
            raise SchemaRefused(f"{place}: the schema has too many cases")

    def _meet_shapes(self, left: Any, right: Any, place: str) -> Shape | None:
        if left == right or is_top(right):
            return left  # type: ignore[no-any-return]
        if is_top(left):
            return right  # type: ignore[no-any-return]
        if isinstance(left, Booleans):
            values = left.values & right.values
            return Booleans(values) if values else None
        if isinstance(left, Numbers):
            return meet_numbers(left, right)
        if isinstance(left, Texts):
            return _meet_texts(left, right, place)
        return self._meet_items(left, right) if isinstance(left, Items) else self._meet_members(left, right)

    def _meet_items(self, left: Items, right: Items) -> Items | None:
        low, high = max(left.low, right.low), _least(left.high, right.high)
        prefix = list[Goal]()
        for index in range(max(len(left.prefix), len(right.prefix))):
            goal = joined([left.item(index), right.item(index)])
            if self.is_impossible(goal):
                high = index if high is None else min(high, index)
                break
            prefix.append(goal)
        if high is not None and low > high:
            return None
        contains = tuple(dict.fromkeys([*left.contains, *right.contains]))
        rest = joined([left.rest, right.rest])
        return Items(tuple(prefix), rest, low, high, contains, left.unique or right.unique)

    def _meet_members(self, left: Members, right: Members) -> Members | None:
        theirs, names = dict(right.names), dict[str, Goal]()
        for name, goal in left.names:
            names[name] = joined([goal, theirs[name] if name in theirs else right.value(name)])
        for name, goal in right.names:
            if name not in names:
                names[name] = joined([left.value(name), goal])
        required = tuple(dict.fromkeys([*left.required, *right.required]))
        for name, goal in names.items():
            if len(goal) > 1 and self.is_impossible(goal):
                names[name] = FALSE
        if any(names.get(name) == FALSE for name in required):
            return None
        low, high = max(left.low, right.low), _least(left.high, right.high)
        if high is not None and max(low, len(required)) > high:
            return None
        return Members(
            tuple(names.items()),
            tuple(dict.fromkeys([*left.others, *right.others])),
            required,
            low,
            high,
            tuple(dict.fromkeys([*left.keys, *right.keys])),
            tuple(dict.fromkeys([*left.beyond, *right.beyond])),
        )

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
        met = self._meet_shapes(left, right, "#")
        return met is None or self._is_impossible_shape(met, _PROOF_DEPTH)


def _size_of(shape: Shape) -> int:
    if isinstance(shape, Members):
        return 1 + len(shape.names) + len(shape.required)
    if isinstance(shape, Texts):
        return 1 + len(shape.values or ())
    return 1 + len(shape.prefix) if isinstance(shape, Items) else 1


def _meet_texts(left: Texts, right: Texts, place: str) -> Texts | None:
    listed, other = (left, right) if left.values is not None else (right, left)
    if listed.values is not None:
        known = None if other.values is None else set(other.values)
        values = tuple(v for v in listed.values if (other.holds(v) if known is None else v in known))
        return Texts(values=values) if values else None
    language = both([left.language, right.language])
    try:
        return None if is_empty(language) else Texts(language)
    except TooComplex as error:
        raise SchemaRefused(f"{place}: {error}") from None
    except RecursionError:
        raise SchemaRefused(f"{place}: is nested too deeply") from None


def _least(left: int | None, right: int | None) -> int | None:
    return min((bound for bound in (left, right) if bound is not None), default=None)
