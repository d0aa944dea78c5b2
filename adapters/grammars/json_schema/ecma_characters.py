"""Characters of patterns: sets, escapes and categories of Unicode, read with a cursor."""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from functools import lru_cache
from itertools import chain
from typing import NoReturn

from adapters.grammars.json_schema.patterns import ANY_CHAR, Ranges, others, ranges_of

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_RARE_SPACE = (0x202F, 0x205F, 0x3000, 0xFEFF)
_SPACE = ranges_of(
    (code, code)
    for code in (*range(0x09, 0x0E), 0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, *_RARE_SPACE)
)
DOT = others(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
"""Characters that ``.`` matches: all but ends of lines."""

_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): others(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_NAMED_CATEGORIES = {"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "Symbol": "S", "Separator": "Z"}
_NAMED_CATEGORIES |= {"Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Decimal_Number": "Nd"}


class PatternError(ValueError):
    """A pattern is malformed, or not regular; the message is one short line."""


class Cursor:
    """A position in a pattern."""

    def __init__(self, pattern: str) -> None:
        self.text, self.at = pattern, 0

    @property
    def is_at_end(self) -> bool:
        """Whether no character is left."""
        return self.at == len(self.text)

    def fail(self, problem: str) -> NoReturn:
        """Raise `PatternError` with the position."""
        raise PatternError(f"{problem} at {self.at}")

    def ahead(self, count: int = 1) -> str:
        """The next ``count`` characters, or those that are left."""
        return self.text[self.at : self.at + count]

    def find(self, char: str) -> int:
        """Index of the next ``char``, -1 if there is none."""
        return self.text.find(char, self.at)

    def peek(self, ahead: str) -> bool:
        """Whether ``ahead`` follows."""
        return self.text.startswith(ahead, self.at)

    def take(self, ahead: str) -> bool:
        """Move past ``ahead``, if it follows."""
        found = self.peek(ahead)
        self.at += len(ahead) * found
        return found

    def next(self) -> str:
        """Move past one character."""
        if self.is_at_end:
            self.fail("unexpected end")
        self.at += 1
        return self.text[self.at - 1]


class CharacterReader:
    """Reads sets and escapes.

    Args:
        cursor: Position in the pattern, moved past what is read.

    Attributes:
        num_ranges: Ranges of all sets that have been read.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.num_ranges = 0

    def set_ranges(self) -> Ranges:
        """Code points of a set, whose ``[`` has been read."""
        negated = self._cursor.take("^")
        pairs, classes = list[tuple[int, int]](), dict[Ranges, None]()
        while not self._cursor.take("]"):
            low = self._member()
            if isinstance(low, tuple):
                classes[low] = None
                continue
            high: int | Ranges = low
            if self._cursor.peek("-") and not self._cursor.peek("-]"):
                self._cursor.at += 1
                high = self._member()
            if isinstance(high, tuple):
                pairs += [(low, low), (0x2D, 0x2D)]
                classes[high] = None
            elif high < low:
                self._cursor.fail("range out of order")
            else:
                pairs.append((low, high))
        self.num_ranges += len(pairs) + sum(map(len, classes))
        found = ranges_of(chain(pairs, *classes))  # each class once: one of Unicode has hundreds of ranges
        return others(found) if negated else found

    def _member(self) -> int | Ranges:
        char = self._cursor.next()
        return self.escape(in_set=True) if char == "\\" else ord(char)

    def escape(self, *, in_set: bool) -> int | Ranges:
        """One code point or several, by the escape whose backslash has been read."""
        char = self._cursor.next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS and not (char == "0" and self._cursor.ahead().isdigit()):
            return _CONTROLS[char]
        if char == "b" and in_set:
            return 8
        if char in ("p", "P"):
            name = self._property()
            return _category(name) if char == "p" else _other_categories(name)
        if char == "x":
            return self._hex(2)
        if char == "u":
            return self._unicode()
        if char == "c" and self._cursor.ahead().isascii() and self._cursor.ahead().isalpha():
            return ord(self._cursor.next()) % 32
        if char in ("b", "B"):
            self._cursor.fail("a word boundary is not supported")
        if char.isdigit() or char == "k":
            self._cursor.fail("a back-reference is not supported")
        if char.isalpha():
            self._cursor.fail(f"unknown escape \\{char}")
        return ord(char)

    def _hex(self, digits: int) -> int:
        found = self._cursor.ahead(digits)
        try:
            value = int(found, 16)
        except ValueError:
            value = -1
        if len(found) != digits or value < 0 or not (found.isascii() and found.isalnum()):
            self._cursor.fail(f"expected {digits} hexadecimal digits")
        self._cursor.at += digits
        return value

    def _unicode(self) -> int:
        if self._cursor.take("{"):
            end = self._cursor.find("}")
            count = end - self._cursor.at
            value = self._hex(count) if 0 < count < 7 else sys.maxunicode + 1
            self._cursor.at += 1
        else:
            value = self._hex(4)
            if 0xD800 <= value <= 0xDBFF and self._cursor.take("\\u"):
                low = self._hex(4)
                if 0xDC00 <= low <= 0xDFFF:
                    value = 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00)
        if value > sys.maxunicode or 0xD800 <= value <= 0xDFFF:
            self._cursor.fail("no character")
        return value

    def _property(self) -> str:
        end = self._cursor.find("}")
        if not self._cursor.take("{") or end < 0:
            self._cursor.fail("expected the name of a property")
        name = self._cursor.text[self._cursor.at : end].removeprefix("General_Category=").removeprefix("gc=")
        self._cursor.at = end + 1
        category = _NAMED_CATEGORIES.get(name, name)
        if not _category(category):
            self._cursor.fail(f"unknown property {name[:24]}")
        return category


@lru_cache(128)
def _category(name: str) -> Ranges:
    """Code points of a general category of Unicode, none if it is unknown."""
    if name == "Any":
        return ANY_CHAR.ranges
    found = [pair for category, pairs in _categories().items() if category.startswith(name) for pair in pairs]
    return ranges_of(found) if 1 <= len(name) <= 2 else ()


@lru_cache(128)
def _other_categories(name: str) -> Ranges:
    """Code points of all other general categories."""
    return others(_category(name))


@lru_cache(1)
def _categories() -> dict[str, list[tuple[int, int]]]:
    """Code points of each category; surrogates ("Cs") are left out."""
    found = defaultdict[str, list[tuple[int, int]]](list)
    start, before = 0, unicodedata.category("\0")
    for code in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(code)) if code <= sys.maxunicode else ""
        if category != before:
            found[before].append((start, code - 1))
            start, before = code, category
    found.pop("Cs")
    return dict(found)
