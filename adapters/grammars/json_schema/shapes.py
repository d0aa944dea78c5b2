"""Shapes: sets of JSON values of one type, in which schemas are united and intersected.

A schema is a union of shapes. Values inside arrays and objects are *goals*: conjunctions of schemas
of the document and of their negations, which are looked at when they are needed. So a document's
references may go round, and every question about it has finitely many goals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from adapters.grammars.json_schema.decimals import Numbers
from adapters.grammars.json_schema.patterns import ANYTHING, Language, TooComplex, alt, matches, spend, text

Literal: TypeAlias = tuple[int, bool]
"""A schema of the document by its number, and whether it holds or does not."""

Goal: TypeAlias = tuple[Literal, ...]
"""Literals that all hold, in the order of the document; every value if there are none."""

TRUE: Goal = ()
FALSE: Goal = ((0, False),)
"""No value: schema 0 is ``true``."""


class SchemaRefused(ValueError):
    """A schema cannot be enforced exactly; the message names the place in the document."""


@dataclass(frozen=True, slots=True)
class Null:
    """The value null."""


@dataclass(frozen=True, slots=True)
class Booleans:
    """True, false, or both."""

    values: frozenset[bool] = frozenset({True, False})


@dataclass(frozen=True, slots=True)
class Texts:
    """Strings of a language; where they are listed, these.

    Attributes:
        language: The texts, if they are not listed.
        values: The texts, None if they are not listed.
    """

    language: Language = ANYTHING
    values: tuple[str, ...] | None = None

    def as_language(self) -> Language:
        """The texts as one language."""
        return self.language if self.values is None else alt(map(text, self.values))

    def holds(self, value: str) -> bool:
        """Whether ``value`` is one of the texts."""
        return matches(self.language, value) if self.values is None else value in self.values


@dataclass(frozen=True, slots=True)
class Items:
    """Arrays.

    Attributes:
        prefix: Goals of the first items.
        rest: Goal of every other item.
        low: Least number of items.
        high: Greatest number of items, None if there is none.
        contains: Goals that some items must meet, and the least number of these items.
        unique: Whether no two items are equal.
    """

    prefix: tuple[Goal, ...] = ()
    rest: Goal = TRUE
    low: int = 0
    high: int | None = None
    contains: tuple[tuple[Goal, int], ...] = ()
    unique: bool = False

    def item(self, index: int) -> Goal:
        """Goal of one item."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class Others:
    """Constraints of one schema on the members that it does not name.

    Attributes:
        patterns: Goals of members whose name is in a language; all that match hold.
        rest: Goal of a member whose name is in none of them.
    """

    patterns: tuple[tuple[Language, Goal], ...]
    rest: Goal

    def value(self, name: str) -> Goal:
        """Goal of the member ``name``."""
        found = [goal for language, goal in self.patterns if matches(language, name)]
        return joined(found) if found else self.rest


@dataclass(frozen=True, slots=True)
class Members:
    """Objects.

    Attributes:
        names: Goals of named members, in the order in which they are written.
        others: Constraints of schemas on members that they do not name; all hold.
        required: Names of members that there must be.
        low: Least number of members.
        high: Greatest number of members, None if there is none.
        keys: Languages that every name is in.
        beyond: Sets of names; for each set some member has a name that is not in it.
    """

    names: tuple[tuple[str, Goal], ...] = ()
    others: tuple[Others, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    keys: tuple[Language, ...] = ()
    beyond: tuple[frozenset[str], ...] = ()

    def value(self, name: str) -> Goal:
        """Goal of the member ``name``, if it is not one of `names`. Raises `SchemaRefused`."""
        count_cases(len(self.others))
        return joined(block.value(name) for block in self.others)

    def allows(self, name: str) -> bool:
        """Whether a member may have that name."""
        return all(matches(language, name) for language in self.keys)


Shape: TypeAlias = Null | Booleans | Numbers | Texts | Items | Members
Shapes: TypeAlias = tuple[Shape, ...]

KINDS: tuple[type[Shape], ...] = (Null, Booleans, Numbers, Texts, Items, Members)
TOP: Shapes = tuple(kind() for kind in KINDS)
"""Every value."""

_TOP_OF = dict(zip(KINDS, TOP, strict=True))


def is_top(shape: Shape) -> bool:
    """Whether it is every value of its type."""
    return shape == _TOP_OF[type(shape)]


def count_cases(number: int) -> None:
    """Count cases of a document that are looked at, as work that is `limited`.

    Raises:
        SchemaRefused: there are too many.
    """
    try:
        spend(number)
    except TooComplex:
        raise SchemaRefused("#: the schema has too many cases") from None


def joined(goals: Iterable[Goal]) -> Goal:
    """Conjunction of ``goals``."""
    found = dict[Literal, None]()
    for goal in goals:
        if goal == FALSE:
            return FALSE
        found.update(dict.fromkeys(goal))
    if any((node, not holds) in found for node, holds in found):
        return FALSE
    return tuple(found)


def union(shapes: Iterable[Shape]) -> Shapes:
    """The shapes, each once, without those of a type of which every value is there."""
    found = dict.fromkeys(shapes)
    full = {type(shape) for shape in found if is_top(shape)}
    return tuple(shape for shape in found if type(shape) not in full or is_top(shape))


def instead(shapes: Iterable[Shape], *kinds: type[Shape]) -> Shapes:
    """``shapes``, and every value of other types than ``kinds``."""
    return (*(shape for shape in TOP if type(shape) not in kinds), *shapes)
