"""Regular languages of Unicode texts, with boolean operations.

A language is decided by Brzozowski derivatives (J. ACM 11(4), 1964); `terminals` writes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

MAX_WORK = 400_000
"""Parts of languages that one decision may examine."""

AT_ONCE_S, PAUSE_S = 0.0005, 0.00005
"""Seconds of a decision without a pause, and of the pause: the threads that serve others wait for
Python's lock, and would get it after 5 ms each time.
"""

_COPIED_AT_ONCE, _RANGES_AT_ONCE = 32, 8
"""Parts that are copied, and ranges that are looked at, in the time of looking at one part."""

_LAST = 0x10FFFF
_CACHED = 4_096

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points: sorted, disjoint, not adjacent, both ends inclusive."""


class TooComplex(ValueError):
    """A language cannot be decided within `MAX_WORK`, or a caller's `limited` work."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Cat:
    """A concatenation; the empty text if there are no parts."""

    parts: tuple[Language, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Alt:
    """A union; no text if there are no options."""

    options: tuple[Language, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Repeat:
    """Texts of ``inner``, ``low`` to ``high`` times; without a limit if ``high`` is None."""

    inner: Language
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Both:
    """An intersection."""

    parts: tuple[Language, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Not:
    """A complement: every other text."""

    inner: Language


Language: TypeAlias = Chars | Cat | Alt | Repeat | Both | Not
_Node = TypeVar("_Node", Chars, Cat, Alt, Repeat, Both, Not)

_made: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
"""Interned languages: equal ones are one object, so that comparing takes constant time."""


def _one(kind: type[_Node], *fields: Any) -> _Node:
    key = (kind, *fields)
    found = _made.get(key)
    if found is None:
        found = _made[key] = kind(*fields)
    return cast(_Node, found)


EMPTY_TEXT = _one(Cat, ())
NOTHING = _one(Alt, ())
ANY_CHAR = _one(Chars, ((0, _LAST),))
ANYTHING = _one(Repeat, ANY_CHAR, 0, None)


def chars(ranges: Ranges) -> Language:
    """One character of ``ranges``."""
    return _one(Chars, ranges) if ranges else NOTHING


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Code points of ``pairs`` in any order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def others(ranges: Ranges) -> Ranges:
    """Every code point that is not in ``ranges``."""
    found, at = list[tuple[int, int]](), 0
    for low, high in ranges:
        if low > at:
            found.append((at, low - 1))
        at = high + 1
    return (*found, (at, _LAST)) if at <= _LAST else tuple(found)


def common(left: Ranges, right: Ranges) -> Ranges:
    """Code points that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return ranges_of((low, high) for low, high in pairs if low <= high)


def text(literal: str) -> Language:
    """The language of one text."""
    parts = tuple(map(_char, literal))
    return parts[0] if len(parts) == 1 else _one(Cat, parts)


@lru_cache(4096)
def _char(char: str) -> Language:
    return chars(((ord(char), ord(char)),))


def cat(parts: Iterable[Language]) -> Language:
    """A concatenation."""
    found = list[Language]()
    for part in parts:
        if part is NOTHING:
            return NOTHING
        found += part.parts if isinstance(part, Cat) else [part]
    return found[0] if len(found) == 1 else _one(Cat, tuple(found))


def alt(options: Iterable[Language]) -> Language:
    """A union."""
    found = dict[Language, None]()
    for option in options:
        found.update(dict.fromkeys(option.options if isinstance(option, Alt) else [option]))
    if ANYTHING in found:
        return ANYTHING
    return next(iter(found)) if len(found) == 1 else _one(Alt, tuple(found))


def both(parts: Iterable[Language]) -> Language:
    """An intersection."""
    found = dict[Language, None]()
    for part in parts:
        found.update(dict.fromkeys(part.parts if isinstance(part, Both) else [part]))
    found.pop(ANYTHING, None)
    if NOTHING in found:
        return NOTHING
    if not found:
        return ANYTHING
    return next(iter(found)) if len(found) == 1 else _one(Both, tuple(found))


def complement(inner: Language) -> Language:
    """A complement: every other text."""
    if isinstance(inner, Not):
        return inner.inner
    if inner is ANYTHING:
        return NOTHING
    return ANYTHING if inner is NOTHING else _one(Not, inner)


def repeat(inner: Language, low: int, high: int | None) -> Language:
    """Texts of ``inner``, ``low`` to ``high`` times."""
    if high == 0 or inner is EMPTY_TEXT:
        return EMPTY_TEXT
    if inner is NOTHING:
        return EMPTY_TEXT if low == 0 else NOTHING
    return inner if low == high == 1 else _one(Repeat, inner, low, high)


def of_length(low: int, high: int | None) -> Language:
    """Every text with that many characters."""
    return repeat(ANY_CHAR, low, high)


def length_of(language: Language) -> int | None:
    """The number of characters of each of its texts, None if they differ."""
    match language:
        case Chars():
            return 1
        case Cat(parts):
            lengths = [length_of(part) for part in parts]
            return None if None in lengths else sum(length or 0 for length in lengths)
        case Alt(options):
            found = {length_of(option) for option in options}
            return found.pop() if len(found) == 1 else None
        case Repeat(inner, low, high):
            length = length_of(inner)
            return None if length is None or low != high else length * low
    return None


@lru_cache(_CACHED)
def is_nullable(language: Language) -> bool:
    """Whether the empty text is in it."""
    match language:
        case Chars():
            return False
        case Cat(parts) | Both(parts):
            return all(map(is_nullable, parts))
        case Alt(options):
            return any(map(is_nullable, options))
        case Repeat(inner, low, _):
            return low == 0 or is_nullable(inner)
        case Not(inner):
            return not is_nullable(inner)


@lru_cache(_CACHED)
def derivative(language: Language, char: int) -> Language:
    """The language of the texts that may follow ``char`` in it."""
    _give_way()
    match language:
        case Chars(ranges):
            return EMPTY_TEXT if any(low <= char <= high for low, high in ranges) else NOTHING
        case Cat(parts):
            found = list[Language]()
            for index, part in enumerate(parts):
                rest = derivative(part, char)
                if rest is not NOTHING:
                    found.append(cat([rest, *parts[index + 1 :]]))
                if not is_nullable(part):
                    break
            return alt(found)
        case Alt(options):
            return alt(derivative(option, char) for option in options)
        case Repeat(inner, low, high):
            rest = repeat(inner, max(0, low - 1), None if high is None else high - 1)
            return cat([derivative(inner, char), rest])
        case Both(parts):
            return both(derivative(part, char) for part in parts)
        case Not(inner):
            return complement(derivative(inner, char))


_turn = threading.local()


def _give_way() -> None:
    """Let other threads go on, if this one has not for `AT_ONCE_S`."""
    if time.monotonic() - getattr(_turn, "began_s", 0.0) > AT_ONCE_S:
        time.sleep(PAUSE_S)
        _turn.began_s = time.monotonic()


_left: ContextVar[list[int] | None] = ContextVar("work left for languages", default=None)


@contextmanager
def limited(work: int) -> Iterator[Callable[[], int]]:
    """Limit the decisions within to ``work`` parts together, and to what is left of an outer limit;
    more raise `TooComplex`. Yields a function that tells the work so far.
    """
    outer = _left.get()
    work = work if outer is None else min(work, outer[0])
    left = [work]
    token = _left.set(left)
    try:
        yield lambda: work - left[0]
    finally:
        _left.reset(token)
        if outer is not None:
            outer[0] -= work - left[0]


def spend(work: int) -> None:
    """Take ``work`` from what is left of a `limited` one. Raises `TooComplex`."""
    left = _left.get()
    if left is not None:
        left[0] -= work
        if left[0] < 0:
            raise TooComplex("is too complex, together with others")


def matches(language: Language, value: str) -> bool:
    """Whether ``value`` is in it.

    Raises:
        TooComplex: the `limited` work is used up.
    """
    for char in value:
        spend(_num_visited(language) + _num_copied(language) // _COPIED_AT_ONCE)
        language = derivative(language, ord(char))
    return is_nullable(language)


def is_empty(language: Language, most: int | None = None) -> bool:
    """Whether no text is in it.

    Args:
        language: The language.
        most: Most work to find that, None for `MAX_WORK`.

    Raises:
        TooComplex: that takes more than ``most``, or more than is left of a `limited` work.
    """
    found, work = _emptiness(language, MAX_WORK if most is None else most)
    spend(work)
    return found


@lru_cache(_CACHED)
def _emptiness(language: Language, most: int) -> tuple[bool, int]:
    """Whether no text is in it, and the work to find that."""
    parts = language.parts if isinstance(language, Both) else (language,)
    lengths = [part for part in parts if isinstance(part, Repeat) and part.inner is ANY_CHAR]
    low = max((part.low for part in lengths), default=0)
    high = min((part.high for part in lengths if part.high is not None), default=None)
    states, length, work, seen = {both(part for part in parts if part not in lengths)}, 0, 0, set[Language]()
    while states and (high is None or length <= high):
        if length >= low:
            if any(map(is_nullable, states)):
                return False, work
            if high is None:
                states -= seen
                seen |= states
        following, length = set[Language](), length + 1
        for state in states:
            work += len(_representatives(state)) * _num_visited(state) + _num_copied(state) // _COPIED_AT_ONCE
            if work > most:
                raise TooComplex("is too complex to tell whether a text matches it")
            following |= _successors(state)
        states, work = following, work + 1
    return True, work


@lru_cache(_CACHED)
def _successors(language: Language) -> frozenset[Language]:
    """The derivatives of a language that are not plainly empty."""
    return frozenset(derivative(language, char) for char in _representatives(language)) - {NOTHING}


@lru_cache(_CACHED)
def _num_visited(language: Language) -> int:
    """The number of its parts that a derivative looks at; many ranges count as several."""
    match language:
        case Chars(ranges):
            return 1 + len(ranges) // _RANGES_AT_ONCE
        case Alt(parts) | Both(parts):
            return 1 + sum(map(_num_visited, parts))
        case Cat(parts):
            return 1 + sum(map(_num_visited, parts[: _num_leading(parts)]))
        case Repeat(inner, _, _) | Not(inner):
            return 1 + _num_visited(inner)


@lru_cache(_CACHED)
def _num_copied(language: Language) -> int:
    """The number of parts that are copied if each of its parts has a derivative once."""
    match language:
        case Chars():
            return 0
        case Alt(parts) | Both(parts):
            return sum(map(_num_copied, parts))
        case Cat(parts):
            count = _num_leading(parts)
            return count * (2 * len(parts) - count) // 2 + sum(map(_num_copied, parts[:count]))
        case Repeat(inner, _, _) | Not(inner):
            return _num_copied(inner)


def _num_leading(parts: Sequence[Language]) -> int:
    """The number of parts with which a text of a concatenation may begin."""
    return next((count for count, part in enumerate(parts, 1) if not is_nullable(part)), len(parts))


@lru_cache(_CACHED)
def _representatives(language: Language) -> list[int]:
    """One code point of each class that no set of its first characters divides."""
    turns = {0: 0, 0xE000: 0}  # sets, as bits, that begin or end at a code point
    for index, ranges in enumerate(dict.fromkeys(_first_sets(language))):
        for low, high in ranges:
            turns[low] = turns.get(low, 0) ^ (1 << index)
            turns[high + 1] = turns.get(high + 1, 0) ^ (1 << index)
    found, held = dict[int, int](), 0
    for cut in sorted(turns):
        held ^= turns[cut]
        if cut <= _LAST and not 0xD800 <= cut < 0xE000:
            found.setdefault(held, cut)
    return list(found.values())


def _first_sets(language: Language) -> Iterator[Ranges]:
    match language:
        case Chars(ranges):
            yield ranges
        case Cat(parts):
            for part in parts:
                yield from _first_sets(part)
                if not is_nullable(part):
                    break
        case Both(parts) | Alt(parts):
            for part in parts:
                yield from _first_sets(part)
        case Repeat(inner, _, _) | Not(inner):
            yield from _first_sets(inner)
