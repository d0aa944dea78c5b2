"""Patterns of JSON Schema: regular expressions of ECMA-262 with its flag ``u``, as `Language`."""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NoReturn, TypeAlias

from adapters.grammars.json_schema.patterns import (
    ANY_CHAR,
    ANYTHING,
    NOTHING,
    Language,
    Ranges,
    alt,
    both,
    cat,
    chars,
    complement,
    is_nullable,
    length_of,
    others,
    ranges_of,
    repeat,
    text,
)

MAX_ALTERNATIVES = 256
"""Ways through a pattern whose groups hold anchors."""

MAX_PATTERN = 4_096
"""Characters of one pattern."""

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_RARE_SPACE = (0x202F, 0x205F, 0x3000, 0xFEFF)
_SPACE = ranges_of(
    (code, code)
    for code in (*range(0x09, 0x0E), 0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, *_RARE_SPACE)
)
_DOT = others(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): others(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_NAMED_CATEGORIES = {"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "Symbol": "S", "Separator": "Z"}
_NAMED_CATEGORIES |= {"Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Decimal_Number": "Nd"}


_LOOKS = (("=", True, True), ("!", True, False), ("<=", False, True), ("<!", False, False))


class PatternError(ValueError):
    """A pattern is malformed, or not regular; the message is one short line."""


@dataclass(frozen=True, slots=True)
class _Anchor:
    """``^`` or ``$``."""

    at_start: bool


@dataclass(frozen=True, slots=True)
class _Look:
    """A look-around: what is ahead or behind there, or is not.

    Attributes:
        options: The alternatives of the pattern in it.
        is_ahead: It looks ahead.
        holds: It is there.
    """

    options: tuple[tuple[_Part, ...], ...]
    is_ahead: bool
    holds: bool


_START, _END = _Anchor(True), _Anchor(False)
_Part: TypeAlias = "Language | _Anchor | _Look | _Group"
_Flat: TypeAlias = "Language | _Anchor | _Look"


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives with anchors in them, which are there once, or where ``low`` is 0 not at all."""

    options: tuple[tuple[_Part, ...], ...]
    low: int = 1


@lru_cache(1_024)
def searched(pattern: str) -> Language:
    """The texts in which ``pattern`` is found, anywhere unless it is anchored.

    Raises:
        PatternError: it is malformed, or needs more than a regular language (a back-reference), a
            word boundary, or a look-around in the middle.
    """
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"expected at most {MAX_PATTERN} characters, got {len(pattern)}")
    try:
        options = _Parser(pattern).options()
    except RecursionError:
        raise PatternError("is nested too deeply") from None
    return alt(_anchored(sequence) for sequence in _sequences(options))


@lru_cache(256)
def whole(pattern: str) -> Language:
    """The texts that ``pattern`` matches from beginning to end."""
    return alt(_anchored((_START, *sequence, _END)) for sequence in _sequences(_Parser(pattern).options()))


def _sequences(options: tuple[tuple[_Part, ...], ...]) -> list[tuple[_Flat, ...]]:
    """Every way through groups that hold anchors."""
    found = list[tuple[_Flat, ...]]()
    for sequence in options:
        ways = list[list[tuple[_Flat, ...]]]()
        for part in sequence:
            if isinstance(part, _Group):
                ways.append([*([()] if part.low == 0 else []), *_sequences(part.options)])
            else:
                ways.append([(part,)])
        count = len(found)
        for way in ways:
            count = max(count, 1) * len(way)
        if count > MAX_ALTERNATIVES:
            raise PatternError("has too many groups with ^, $ or a look-around in them")
        found += [sum(chosen, ()) for chosen in product(*ways)]
    return found


def _anchored(sequence: tuple[_Flat, ...]) -> Language:
    starts = [index for index, part in enumerate(sequence) if part == _START]
    ends = [index for index, part in enumerate(sequence) if part == _END]
    first, last = (starts[-1] if starts else -1), (ends[0] if ends else len(sequence))
    if starts and ends and last < first:
        raise PatternError("has $ before ^")
    beyond = (*sequence[: max(first, 0)], *sequence[last + 1 :])
    outside = [part for part in beyond if not isinstance(part, _Anchor | _Look)]
    if not all(map(is_nullable, outside)):
        return NOTHING
    if any(isinstance(part, _Look) for part in beyond):
        raise PatternError("has a look-around outside of ^ and $")
    inner = sequence[first + 1 : last]
    return _around([*([] if starts else [ANYTHING]), *inner, *([] if ends else [ANYTHING])])


def _around(sequence: list[_Flat]) -> Language:
    """A sequence without anchors, and what its look-arounds say of the whole text.

    Raises:
        PatternError: the place of one is not at a fixed distance from the beginning, if it looks
            ahead, or from the end.
    """
    found = [cat(part for part in sequence if not isinstance(part, _Anchor | _Look))]
    for index, look in enumerate(sequence):
        if not isinstance(look, _Look):
            continue
        fixed = sequence[:index] if look.is_ahead else sequence[index + 1 :]
        outside = cat(part for part in fixed if not isinstance(part, _Anchor | _Look))
        if length_of(outside) is None:
            raise PatternError("has a look-around in the middle, which is not supported")
        inner = alt(_looked(option, look.is_ahead) for option in _sequences(look.options))
        seen = cat([outside, inner] if look.is_ahead else [inner, outside])
        found.append(seen if look.holds else complement(seen))
    return both(found)


def _looked(sequence: tuple[_Flat, ...], is_ahead: bool) -> Language:
    """The rest of a text that a look-around allows."""
    end = _END if is_ahead else _START
    inner = [part for part in sequence if part != end]
    if any(isinstance(part, _Anchor | _Look) for part in inner) or end in sequence[1:-1]:
        raise PatternError("has a look-around with ^, $ or another one in it")
    parts = [part for part in inner if not isinstance(part, _Anchor | _Look)]
    if end not in sequence:
        parts = [*parts, ANYTHING] if is_ahead else [ANYTHING, *parts]
    return cat(parts)


class _Parser:
    """A recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    def options(self) -> tuple[tuple[_Part, ...], ...]:
        """The whole pattern."""
        found = self._disjunction()
        if self._at < len(self._text):
            self._fail("unmatched )")
        return found

    def _fail(self, problem: str) -> NoReturn:
        raise PatternError(f"{problem} at {self._at}")

    def _peek(self, ahead: str) -> bool:
        return self._text.startswith(ahead, self._at)

    def _take(self, ahead: str) -> bool:
        found = self._peek(ahead)
        self._at += len(ahead) * found
        return found

    def _next(self) -> str:
        if self._at == len(self._text):
            self._fail("unexpected end")
        self._at += 1
        return self._text[self._at - 1]

    def _disjunction(self) -> tuple[tuple[_Part, ...], ...]:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return tuple(found)

    def _sequence(self) -> tuple[_Part, ...]:
        found = list[_Part]()
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            if self._take("^"):
                found.append(_START)
            elif self._take("$"):
                found.append(_END)
            else:
                atom = self._atom()
                found.append(atom if isinstance(atom, _Look) else self._quantified(atom))
        return tuple(found)

    def _quantified(self, atom: Language | _Group) -> Language | _Group:
        low, high = self._quantifier()
        if isinstance(atom, _Group):
            if (low, high) in ((1, 1), (0, 1)):
                return _Group(atom.options, low)
            self._fail("a group with ^, $ or a look-around is repeated")
        return repeat(atom, low, high)

    def _quantifier(self) -> tuple[int, int | None]:
        found: tuple[int, int | None] = (1, 1)
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                found = times
                break
        else:
            counted = self._counted()
            if counted is None:
                return found
            found = counted
        self._take("?")
        if self._peek("*") or self._peek("+") or self._peek("?"):
            self._fail("nothing to repeat")
        return found

    def _counted(self) -> tuple[int, int | None] | None:
        end = self._text.find("}", self._at)
        if not self._peek("{") or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not (low.isascii() and low.isdigit()) or (high and not (high.isascii() and high.isdigit())):
            return None  # as in browsers, a brace that is no quantifier is a character
        if len(low) > 6 or len(high) > 6:
            self._fail("too many repetitions")
        self._at = end + 1
        bounds = (int(low), int(high) if high else None if comma else int(low))
        if bounds[1] is not None and bounds[1] < bounds[0]:
            self._fail("numbers out of order")
        return bounds

    def _atom(self) -> Language | _Look | _Group:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return chars(self._set())
        if char == ".":
            return chars(_DOT)
        if char == "\\":
            found = self._escape(in_set=False)
            return chars(found if isinstance(found, tuple) else ((found, found),))
        if char in "*+?":
            self._at -= 1
            self._fail("nothing to repeat")
        if not char.isprintable() and 0xD800 <= ord(char) <= 0xDFFF:
            self._fail("half of a surrogate pair")
        return text(char)

    def _group(self) -> Language | _Look | _Group:
        if self._take("?"):
            for sign, is_ahead, holds in _LOOKS:
                if self._take(sign):
                    look = _Look(self._disjunction(), is_ahead, holds)
                    if not self._take(")"):
                        self._fail("unclosed group")
                    return look
            if self._take("<") or self._take("P<"):
                self._at = self._text.find(">", self._at) + 1
                if not self._at:
                    self._at = len(self._text)
                    self._fail("expected > behind a name")
            elif not self._take(":"):
                self._fail("unknown kind of group")
        options = self._disjunction()
        if not self._take(")"):
            self._fail("unclosed group")
        if any(isinstance(part, _Anchor | _Look | _Group) for option in options for part in option):
            return _Group(options)
        languages = ([part for part in option if not isinstance(part, _Anchor | _Look | _Group)] for option in options)
        return alt(map(cat, languages))

    def _set(self) -> Ranges:
        negated = self._take("^")
        pairs = list[tuple[int, int]]()
        while not self._take("]"):
            low = self._member()
            if isinstance(low, tuple):
                pairs += low
                continue
            high: int | Ranges = low
            if self._peek("-") and not self._peek("-]"):
                self._at += 1
                high = self._member()
            if isinstance(high, tuple):
                pairs += [(low, low), (0x2D, 0x2D), *high]
            elif high < low:
                self._fail("range out of order")
            else:
                pairs.append((low, high))
        found = ranges_of(pairs)
        return others(found) if negated else found

    def _member(self) -> int | Ranges:
        char = self._next()
        return self._escape(in_set=True) if char == "\\" else ord(char)

    def _escape(self, *, in_set: bool) -> int | Ranges:
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS and not (char == "0" and self._text[self._at : self._at + 1].isdigit()):
            return _CONTROLS[char]
        if char == "b" and in_set:
            return 8
        if char in ("p", "P"):
            ranges = self._property()
            return ranges if char == "p" else others(ranges)
        if char == "x":
            return self._hex(2)
        if char == "u":
            return self._unicode()
        if char == "c" and self._text[self._at : self._at + 1].isalpha():
            return ord(self._next()) % 32
        if char in ("b", "B"):
            self._fail("a word boundary is not supported")
        if char.isdigit() or char == "k":
            self._fail("a back-reference is not supported")
        if char.isalpha():
            self._fail(f"unknown escape \\{char}")
        return ord(char)

    def _hex(self, digits: int) -> int:
        found = self._text[self._at : self._at + digits]
        try:
            value = int(found, 16)
        except ValueError:
            value = -1
        if len(found) != digits or value < 0 or not found.isalnum():
            self._fail(f"expected {digits} hexadecimal digits")
        self._at += digits
        return value

    def _unicode(self) -> int:
        if self._take("{"):
            end = self._text.find("}", self._at)
            value = self._hex(end - self._at) if self._at < end < self._at + 7 else _beyond()
            self._at += 1
        else:
            value = self._hex(4)
            if 0xD800 <= value <= 0xDBFF and self._take("\\u"):
                value = 0x10000 + ((value - 0xD800) << 10) + (self._hex(4) - 0xDC00)
        if value > sys.maxunicode or 0xD800 <= value <= 0xDFFF:
            self._fail("no character")
        return value

    def _property(self) -> Ranges:
        end = self._text.find("}", self._at)
        if not self._take("{") or end < 0:
            self._fail("expected the name of a property")
        name = self._text[self._at : end].removeprefix("General_Category=").removeprefix("gc=")
        self._at = end + 1
        ranges = _category(_NAMED_CATEGORIES.get(name, name))
        if not ranges:
            self._fail(f"unknown property {name[:24]}")
        return ranges


def _beyond() -> int:
    return sys.maxunicode + 1


def _category(name: str) -> Ranges:
    """Code points of a general category of Unicode, none if it is unknown."""
    if name == "Any":
        return ANY_CHAR.ranges
    found = [pair for category, pairs in _categories().items() if category.startswith(name) for pair in pairs]
    return ranges_of(found) if 1 <= len(name) <= 2 else ()


@lru_cache(1)
def _categories() -> dict[str, list[tuple[int, int]]]:
    """Code points of each category; those of no character ("Cs") are left out."""
    found = defaultdict[str, list[tuple[int, int]]](list)
    start, before = 0, unicodedata.category("\0")
    for code in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(code)) if code <= sys.maxunicode else ""
        if category != before:
            found[before].append((start, code - 1))
            start, before = code, category
    found.pop("Cs")
    return dict(found)
