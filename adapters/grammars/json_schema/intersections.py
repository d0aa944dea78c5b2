"""Intersections of two shapes of one type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from adapters.grammars.json_schema.decimals import Numbers
from adapters.grammars.json_schema.decimals import meet as meet_numbers
from adapters.grammars.json_schema.patterns import TooComplex, both, is_empty
from adapters.grammars.json_schema.shapes import (
    FALSE,
    Booleans,
    Goal,
    Items,
    Members,
    SchemaRefused,
    Shape,
    Texts,
    is_top,
    joined,
)

IsImpossible: TypeAlias = Callable[[Goal], bool]
"""Whether it is plain that no value meets a goal."""


def meet_shapes(left: Any, right: Any, place: str, is_impossible: IsImpossible) -> Shape | None:
    """The values that are in both shapes, of one type; None if there are none.

    Args:
        left: A shape.
        right: Another of its type.
        place: Place of the schema, for errors.
        is_impossible: Proof that no value meets a goal.

    Raises:
        SchemaRefused: the intersection of two languages is too complex.
    """
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
    meet = _meet_items if isinstance(left, Items) else _meet_members
    return meet(left, right, is_impossible)


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


def _meet_items(left: Items, right: Items, is_impossible: IsImpossible) -> Items | None:
    low, high = max(left.low, right.low), _least(left.high, right.high)
    prefix = list[Goal]()
    for index in range(max(len(left.prefix), len(right.prefix))):
        goal = joined([left.item(index), right.item(index)])
        if is_impossible(goal):
            high = index if high is None else min(high, index)
            break
        prefix.append(goal)
    if high is not None and low > high:
        return None
    contains = tuple(dict.fromkeys([*left.contains, *right.contains]))
    rest = joined([left.rest, right.rest])
    return Items(tuple(prefix), rest, low, high, contains, left.unique or right.unique)


def _meet_members(left: Members, right: Members, is_impossible: IsImpossible) -> Members | None:
    theirs, names = dict(right.names), dict[str, Goal]()
    for name, goal in left.names:
        names[name] = joined([goal, theirs[name] if name in theirs else right.value(name)])
    for name, goal in right.names:
        if name not in names:
            names[name] = joined([left.value(name), goal])
    required = tuple(dict.fromkeys([*left.required, *right.required]))
    for name, goal in names.items():
        if len(goal) > 1 and is_impossible(goal):
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


def _least(left: int | None, right: int | None) -> int | None:
    return min((bound for bound in (left, right) if bound is not None), default=None)


def size_of(shape: Shape) -> int:
    """Work of an intersection with ``shape``."""
    if isinstance(shape, Members):
        return 1 + sum(map(len, (shape.names, shape.required, shape.others, shape.keys, shape.beyond)))
    if isinstance(shape, Texts):
        return 1 + len(shape.values or ())
    return 1 + len(shape.prefix) + len(shape.contains) if isinstance(shape, Items) else 1
