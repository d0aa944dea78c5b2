"""Goals of one document: those that its root leads to, and those that some value meets."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from adapters.grammars.json_schema.distinct import ListedValues, TooMany, is_distinct
from adapters.grammars.json_schema.documents import SchemaDocument
from adapters.grammars.json_schema.grammar_shapes import GrammarShape, Object, grammar_shapes
from adapters.grammars.json_schema.keywords import RULES
from adapters.grammars.json_schema.shapes import FALSE, TRUE, Goal, Items, SchemaRefused, count_cases, joined
from adapters.grammars.json_schema.solver import Solver

MAX_GOALS = 20_000
"""Goals of one document."""


class ReachableGoals:
    """Goals that the root of a document leads to, with the shapes that a grammar writes for each.

    Args:
        schema: The document.

    Attributes:
        root: Goal of the document itself.

    Raises:
        SchemaRefused: the document is malformed, has too many cases, or cannot be enforced.
    """

    def __init__(self, schema: Any) -> None:
        self._document = SchemaDocument(schema)
        solver = Solver(self._document, RULES)
        self.root = solver.goal(schema, "#")
        self._shapes: dict[Goal, tuple[GrammarShape, ...]] = {}
        waiting = [self.root]
        while waiting:
            goal = waiting.pop()
            if goal in self._shapes or goal in (TRUE, FALSE):
                continue
            place = self.place(goal)
            if len(self._shapes) == MAX_GOALS:
                raise SchemaRefused(f"{place}: the schema has too many cases")
            shapes = tuple(each for shape in solver.shapes(goal) for each in grammar_shapes(shape, place))
            self._shapes[goal] = shapes
            waiting += [inner for shape in shapes for inner in _goals_of(shape)]

    def __iter__(self) -> Iterator[Goal]:
        return iter(self._shapes)

    def shapes(self, goal: Goal) -> tuple[GrammarShape, ...]:
        """Shapes of ``goal``; none for those of every value and of no value."""
        return self._shapes.get(goal, ())

    def place(self, goal: Goal) -> str:
        """Place of the first schema of ``goal``."""
        return self._document.place(goal[0][0]) if goal else "#"


class ProductiveGoals:
    """Goals that some value meets: the productive symbols of a grammar.

    Args:
        goals: Goals of the document.
        listed: Values of those that list them.

    Raises:
        SchemaRefused: distinct items have too many combinations, or there are too many cases.
    """

    def __init__(self, goals: ReachableGoals, listed: ListedValues) -> None:
        self._goals, self._listed = goals, listed
        self._found = {TRUE}
        users: defaultdict[Goal, set[Goal]] = defaultdict(set)
        for goal in goals:
            for shape in goals.shapes(goal):
                for inner in _goals_of(shape):
                    users[inner].add(goal)
        waiting = deque(goals)
        queued = set(waiting)
        while waiting:
            goal = waiting.popleft()
            queued.discard(goal)
            if goal in self._found:
                continue
            count_cases(sum(map(_num_goals, goals.shapes(goal))))
            if any(map(self.has_value, goals.shapes(goal))):
                self._found.add(goal)
                waiting.extend(users[goal] - queued)
                queued |= users[goal]

    def __contains__(self, goal: Goal) -> bool:
        return goal in self._found

    def has_value(self, shape: GrammarShape) -> bool:
        """Whether ``shape`` has a value whose parts meet productive goals."""
        if isinstance(shape, Object):
            return self._has_object(shape)
        return not isinstance(shape, Items) or self._has_array(shape)

    def _has_array(self, items: Items) -> bool:
        if is_distinct(items) and self._listed.of_items(items) is not None:
            try:
                return bool(self._listed.steps(items))
            except TooMany:
                raise SchemaRefused("#: uniqueItems can only be enforced for a few listed values") from None
        needed = len(items.prefix) if items.contains else items.low
        if not all(item in self for item in items.prefix[:needed]) or (
            items.contains and items.high is not None and items.high <= len(items.prefix)
        ):
            return False
        if items.low > len(items.prefix) and items.rest not in self:
            return False
        return all(joined([goal, items.rest]) in self for goal, _ in items.contains)

    def _has_object(self, shape: Object) -> bool:
        if not all(goal in self for _, goal, required in shape.names if required):
            return False
        num_named = sum(goal in self for _, goal, _ in shape.names)
        has_extra = any(goal in self for _, goal in shape.extra)
        num_required = sum(required for _, _, required in shape.names)
        if shape.high is not None and max(shape.low, num_required + shape.extra_low) > shape.high:
            return False
        return has_extra or (shape.low <= num_named and not shape.extra_low)

    def unproductive_place(self) -> str:
        """Place of a schema without a value, because of which the root has none."""
        goal, seen = self._goals.root, set[Goal]()
        while goal not in seen and self._goals.shapes(goal):
            seen.add(goal)
            for inner in _needed(self._goals.shapes(goal)[0]):
                if inner not in self and inner != FALSE:
                    goal = inner
                    break
        return self._goals.place(goal)


def _num_goals(shape: GrammarShape) -> int:
    """Goals that tell whether ``shape`` has a value, at most."""
    if isinstance(shape, Object):
        return len(shape.names) + len(shape.extra)
    return len(shape.prefix) + len(shape.contains) if isinstance(shape, Items) else 0


def _goals_of(shape: GrammarShape) -> Iterator[Goal]:
    """Goals of the members or items of ``shape``."""
    if isinstance(shape, Object):
        yield from (goal for _, goal, _ in shape.names)
        yield from (goal for _, goal in shape.extra)
    elif isinstance(shape, Items):
        yield from shape.prefix
        yield shape.rest
        for goal, _ in shape.contains:
            yield joined([goal, shape.rest])


def _needed(shape: GrammarShape) -> Iterator[Goal]:
    """Goals that every value of ``shape`` has a member or item for."""
    if isinstance(shape, Object):
        yield from (goal for _, goal, required in shape.names if required)
    elif isinstance(shape, Items):
        yield from (shape.item(index) for index in range(min(shape.low, len(shape.prefix) + 1)))
