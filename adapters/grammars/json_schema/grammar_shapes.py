"""Shapes as a grammar can write them: members and items in order, and counts that it can keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from adapters.grammars.json_schema.patterns import (
    Both,
    Language,
    Not,
    TooComplex,
    alt,
    both,
    complement,
    is_empty,
    spend,
    text,
)
from adapters.grammars.json_schema.shapes import (
    FALSE,
    Goal,
    Items,
    Members,
    Others,
    SchemaRefused,
    Shape,
    Texts,
    count_cases,
    joined,
)

MAX_CLASSES = 64
"""Classes of names of one object, by the patterns that they match."""

MAX_CASES = 256
"""Cases of one object's or array's constraints."""

_LITTLE = 1_000
"""Work to tell whether a pattern of texts has any: less than a millisecond."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object whose named members are written in order, others after them.

    Attributes:
        names: The named ones: name, goal, and whether it is required.
        extra: Names of others and their goal; the languages are disjoint, and hold no `names`.
        low: Least number of members.
        high: Greatest number of members, None if there is none.
        extra_low: Least number of others, 0 or 1.
    """

    names: tuple[tuple[str, Goal, bool], ...]
    extra: tuple[tuple[Language, Goal], ...]
    low: int
    high: int | None
    extra_low: int


GrammarShape: TypeAlias = Shape | Object
"""A shape as a grammar can write it."""


def grammar_shapes(shape: Shape, place: str) -> Iterator[GrammarShape]:
    """The shapes that a grammar writes for ``shape``.

    Raises:
        SchemaRefused: a grammar cannot count what the schema requires, or there are too many cases.
    """
    if isinstance(shape, Members):
        return _objects(shape, place)
    if isinstance(shape, Texts) and shape.values is None and _is_plainly_empty(shape.language):
        return iter(())
    if isinstance(shape, Items):
        count_cases(len(shape.prefix))
        if shape.contains:
            return _with_contains(shape, place)
    return iter([shape])


def _with_contains(items: Items, place: str) -> Iterator[Items]:
    """Arrays with ``contains``: one of the items in front meets it, or one of the others."""
    ((goal, least), *more) = items.contains
    if more or (least > 1 and items.prefix):
        raise SchemaRefused(f"{place}: contains cannot be enforced beside other items")
    for index, item in enumerate(items.prefix[: items.high]):
        if index == MAX_CASES:
            raise SchemaRefused(f"{place}: has more than {MAX_CASES} cases")
        count_cases(len(items.prefix))
        prefix = (*items.prefix[:index], joined([item, goal]), *items.prefix[index + 1 :])
        yield replace(items, prefix=prefix, low=max(items.low, index + 1), contains=())
    if not items.prefix or items.rest != FALSE:
        yield items


def _objects(members: Members, place: str) -> Iterator[Object]:
    names = dict(members.names)
    listed = [*members.required, *(name for excluded in members.beyond for name in sorted(excluded))]
    for name in listed:
        if name not in names:
            names[name] = members.value(name)
    for name in names:
        if not members.allows(name):
            names[name] = FALSE
    extra = tuple(_extra(members, list(names), place))
    choices = [[*_named_beyond(names, excluded), *([None] if extra else [])] for excluded in members.beyond]
    for index, chosen in enumerate(product(*choices)):
        if index == MAX_CASES:
            raise SchemaRefused(f"{place}: has more than {MAX_CASES} cases")
        count_cases(len(names))
        required = {*members.required, *(name for name in chosen if name is not None)}
        listed_names = tuple((name, goal, name in required) for name, goal in names.items())
        yield Object(listed_names, extra, members.low, members.high, int(None in chosen))


def _named_beyond(names: dict[str, Goal], excluded: frozenset[str]) -> list[str | None]:
    return [name for name, goal in names.items() if name not in excluded and goal != FALSE]


def _extra(members: Members, names: list[str], place: str) -> Iterator[tuple[Language, Goal]]:
    """Classes of names that are not ``names``, by which patterns they match."""
    patterns = list(dict.fromkeys(language for block in members.others for language, _ in block.patterns))
    count_cases(sum(map(len, names)))
    unnamed = [complement(alt(map(text, names)))] if names else []
    classes = [(both([*members.keys, *unnamed]), frozenset[Language]())]
    for pattern in patterns:
        split = [
            (both([language, pattern if matched else complement(pattern)]), found | {pattern} if matched else found)
            for language, found in classes
            for matched in (True, False)
        ]
        classes = [each for each in split if not _is_empty(each[0], place)]
        if len(classes) > MAX_CLASSES:
            raise SchemaRefused(f"{place}: the patterns of names have more than {MAX_CLASSES} cases")
    for language, found in classes:
        goal = joined(goal for block in members.others for goal in _goals(block, found))
        if goal != FALSE and not _is_empty(language, place):
            yield language, goal


def _goals(block: Others, matched: frozenset[Language]) -> list[Goal]:
    """Goals of a member whose name matches these patterns."""
    return [goal for language, goal in block.patterns if language in matched] or [block.rest]


def _is_plainly_empty(language: Language) -> bool:
    """Whether little work shows that a text has no value."""
    try:
        return isinstance(language, Both | Not) and is_empty(language, _LITTLE)
    except TooComplex:
        spend(_LITTLE)
        return False


def _is_empty(language: Language, place: str) -> bool:
    try:
        return isinstance(language, Both | Not) and is_empty(language)
    except TooComplex as error:
        raise SchemaRefused(f"{place}: the pattern of a name {error}") from None
