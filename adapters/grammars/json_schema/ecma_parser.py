"""Syntax of ECMA-262 regular expressions with flag ``u``: alternatives, terms and assertions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from adapters.grammars.json_schema.ecma_characters import DOT, CharacterReader, Cursor
from adapters.grammars.json_schema.patterns import Language, alt, cat, chars, repeat, text

_LOOKS = (("=", True, True), ("!", True, False), ("<=", False, True), ("<!", False, False))


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    at_start: bool


@dataclass(frozen=True, slots=True)
class LookAround:
    """A look-around: whether a pattern matches ahead of a position, or behind it.

    Attributes:
        options: Alternatives of the pattern.
        is_ahead: Whether it looks ahead.
        holds: Whether the pattern matches.
    """

    options: tuple[tuple[Term, ...], ...]
    is_ahead: bool
    holds: bool


START, END = Anchor(True), Anchor(False)
Term: TypeAlias = "Language | Anchor | LookAround | Group"
FlatTerm: TypeAlias = "Language | Anchor | LookAround"


@dataclass(frozen=True, slots=True)
class Group:
    """Alternatives that hold anchors; optional where ``low`` is 0, else required once."""

    options: tuple[tuple[Term, ...], ...]
    low: int = 1


class Parser:
    """A recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._cursor = Cursor(pattern)
        self._characters = CharacterReader(self._cursor)

    @property
    def num_ranges(self) -> int:
        """Ranges of all sets of characters so far."""
        return self._characters.num_ranges

    def options(self) -> tuple[tuple[Term, ...], ...]:
        """The whole pattern."""
        found = self._disjunction()
        if not self._cursor.is_at_end:
            self._cursor.fail("unmatched )")
        return found

    def _disjunction(self) -> tuple[tuple[Term, ...], ...]:
        found = [self._sequence()]
        while self._cursor.take("|"):
            found.append(self._sequence())
        return tuple(found)

    def _sequence(self) -> tuple[Term, ...]:
        found = list[Term]()
        while not self._cursor.is_at_end and not self._cursor.peek("|") and not self._cursor.peek(")"):
            if self._cursor.take("^"):
                found.append(START)
            elif self._cursor.take("$"):
                found.append(END)
            else:
                atom = self._atom()
                found.append(atom if isinstance(atom, LookAround) else self._quantified(atom))
        return tuple(found)

    def _quantified(self, atom: Language | Group) -> Language | Group:
        low, high = self._quantifier()
        if isinstance(atom, Group):
            if (low, high) in ((1, 1), (0, 1)):
                return Group(atom.options, low)
            self._cursor.fail("a group with ^, $ or a look-around is repeated")
        return repeat(atom, low, high)

    def _quantifier(self) -> tuple[int, int | None]:
        found: tuple[int, int | None] = (1, 1)
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._cursor.take(sign):
                found = times
                break
        else:
            counted = self._counted()
            if counted is None:
                return found
            found = counted
        self._cursor.take("?")
        if self._cursor.peek("*") or self._cursor.peek("+") or self._cursor.peek("?"):
            self._cursor.fail("nothing to repeat")
        return found

    def _counted(self) -> tuple[int, int | None] | None:
        end = self._cursor.find("}")
        if not self._cursor.peek("{") or end < 0:
            return None
        low, comma, high = self._cursor.text[self._cursor.at + 1 : end].partition(",")
        if not (low.isascii() and low.isdigit()) or (high and not (high.isascii() and high.isdigit())):
            return None  # as in browsers, a brace that is no quantifier is a character
        if len(low) > 6 or len(high) > 6:
            self._cursor.fail("too many repetitions")
        self._cursor.at = end + 1
        bounds = (int(low), int(high) if high else None if comma else int(low))
        if bounds[1] is not None and bounds[1] < bounds[0]:
            self._cursor.fail("numbers out of order")
        return bounds

    def _atom(self) -> Language | LookAround | Group:
        char = self._cursor.next()
        if char == "(":
            return self._group()
        if char == "[":
            return chars(self._characters.set_ranges())
        if char == ".":
            return chars(DOT)
        if char == "\\":
            found = self._characters.escape(in_set=False)
            return chars(found if isinstance(found, tuple) else ((found, found),))
        if char in "*+?{":
            self._cursor.at = begin = self._cursor.at - 1
            is_times = char != "{" or self._counted() is not None
            self._cursor.at = begin
            if is_times:
                self._cursor.fail("nothing to repeat")
            self._cursor.at += 1
        if not char.isprintable() and 0xD800 <= ord(char) <= 0xDFFF:
            self._cursor.fail("half of a surrogate pair")
        return text(char)

    def _group(self) -> Language | LookAround | Group:
        if self._cursor.take("?"):
            for sign, is_ahead, holds in _LOOKS:
                if self._cursor.take(sign):
                    look = LookAround(self._disjunction(), is_ahead, holds)
                    if not self._cursor.take(")"):
                        self._cursor.fail("unclosed group")
                    return look
            if self._cursor.take("<") or self._cursor.take("P<"):
                self._cursor.at = self._cursor.find(">") + 1
                if not self._cursor.at:
                    self._cursor.at = len(self._cursor.text)
                    self._cursor.fail("expected > behind a name")
            elif not self._cursor.take(":"):
                self._cursor.fail("unknown kind of group")
        options = self._disjunction()
        if not self._cursor.take(")"):
            self._cursor.fail("unclosed group")
        if any(isinstance(part, Anchor | LookAround | Group) for option in options for part in option):
            return Group(options)
        languages = (
            [part for part in option if not isinstance(part, Anchor | LookAround | Group)] for option in options
        )
        return alt(map(cat, languages))
