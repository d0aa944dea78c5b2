"""Arrays whose items differ, as a finite automaton: its states are the sets of values so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from adapters.grammars.json_schema.grammar_shapes import GrammarShape
from adapters.grammars.json_schema.scalars import Scalars
from adapters.grammars.json_schema.shapes import TRUE, Goal, Items, count_cases

MAX_STEPS = 8_192
"""Transitions of one array."""

State = frozenset[str]
Steps = dict[State, dict[str, State] | None]
"""Transitions from each state; None where no array can end."""


class TooMany(ValueError):
    """There are more than `MAX_STEPS`."""


def is_distinct(items: Items) -> bool:
    """Whether two items must differ."""
    return items.unique and (items.high is None or items.high > 1)


class ListedValues:
    """Values of the goals that list them.

    Args:
        shapes: Finds the shapes of a goal.
        scalars: Writes the values.
    """

    def __init__(self, shapes: Callable[[Goal], Iterable[GrammarShape]], scalars: Scalars) -> None:
        self._shapes, self._scalars = shapes, scalars
        self._steps: dict[Items, Steps] = {}

    def of_items(self, items: Items) -> list[dict[str, str]] | None:
        """Values of each item of a prefix, and of every other; None if they are not all listed."""
        listed = [self._of_goal(goal) for goal in (*items.prefix, items.rest)]
        found = [values for values in listed if values is not None]
        return None if items.contains or len(found) < len(listed) else found

    def _of_goal(self, goal: Goal) -> dict[str, str] | None:
        """Source of each value of ``goal``, by what tells values apart; None if it lists none."""
        if goal == TRUE:
            return None
        found = dict[str, str]()
        for shape in self._shapes(goal):
            values = self._scalars.listed(shape)
            if values is None:
                return None
            count_cases(len(values))
            found |= values
        return found

    def steps(self, items: Items) -> Steps:
        """Transitions of ``items``, whose values are listed: see `steps_of`."""
        found = self._steps.get(items)
        if found is None:
            listed = self.of_items(items)
            assert listed is not None
            found = self._steps[items] = steps_of(items, listed)
        return found


def steps_of(items: Items, listed: Sequence[Mapping[str, str]]) -> Steps:
    """The transitions of ``items`` that lead to an end; empty if no array is left.

    Args:
        items: Arrays, of which the numbers of items count.
        listed: Values of each item of the prefix, and of every other one.

    Raises:
        TooMany: there are too many.
        SchemaRefused: those of all arrays of the document are too many.
    """
    found: Steps = {}
    num_steps = 0

    def explore(used: State) -> bool:
        nonlocal num_steps
        if used in found:
            return found[used] is not None
        following = dict[str, State]()
        if items.high is None or len(used) < items.high:
            values = listed[min(len(used), len(items.prefix))]
            count_cases(len(values))
            for value in values:
                num_steps += 1
                if num_steps > MAX_STEPS:
                    raise TooMany
                if value not in used and explore(used | {value}):
                    following[value] = used | {value}
        found[used] = following if following or len(used) >= items.low else None
        return found[used] is not None

    explore(frozenset())
    return found if found[frozenset()] is not None else {}
