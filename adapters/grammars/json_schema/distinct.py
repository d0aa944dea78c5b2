"""Arrays whose items differ, as a finite automaton: its states are the sets of values so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapters.grammars.json_schema.shapes import Items

MAX_STEPS = 8_192
"""Transitions of one array."""

State = frozenset[str]
Steps = dict[State, dict[str, State] | None]
"""Transitions from each state; None where no array can end."""


class TooMany(ValueError):
    """There are more than `MAX_STEPS`."""


def steps_of(items: Items, listed: Sequence[Mapping[str, str]]) -> Steps:
    """The transitions of ``items`` that lead to an end; empty if no array is left.

    Args:
        items: Their numbers count.
        listed: The values of each item of the prefix, and of every other one.

    Raises:
        TooMany: there are too many.
    """
    found: Steps = {}
    num_steps = 0

    def explore(used: State) -> bool:
        nonlocal num_steps
        if used in found:
            return found[used] is not None
        following = dict[str, State]()
        if items.high is None or len(used) < items.high:
            for value in listed[min(len(used), len(items.prefix))]:
                num_steps += 1
                if num_steps > MAX_STEPS:
                    raise TooMany
                if value not in used and explore(used | {value}):
                    following[value] = used | {value}
        found[used] = following if following or len(used) >= items.low else None
        return found[used] is not None

    explore(frozenset())
    return found if found[frozenset()] is not None else {}
