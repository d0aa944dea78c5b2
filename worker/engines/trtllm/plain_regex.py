"""Regular expressions that mean the same to llguidance and to XGrammar.

Both differ from each other in ``.``, ``\\d``, ``\\w``, ``\\s``, ``\\b``, negated classes, lazy
repetitions, flags and anchors, so those are refused. What is left has one meaning in every dialect:
characters, classes of characters and ranges, groups, alternatives and repetitions.
"""

from __future__ import annotations

_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_SPELLED = {char: f"\\{letter}" for letter, char in _ESCAPED.items()}
_META = frozenset("\\^$.|?*+()[]{}")
_IN_CLASS = frozenset("\\^-[]&~#")
_MAX_DEPTH = 100


def plain_regex(pattern: str) -> str:
    """``pattern`` spelled so that every dialect reads it alike.

    Raises:
        ValueError: it has something that dialects read differently.
    """
    reader = _Reader(pattern)
    found = reader.alternatives(0)
    if reader.at < len(pattern):
        raise ValueError(f"has {pattern[reader.at]!r} where nothing is open")
    return found


class _Reader:
    """A reader of one pattern.

    Args:
        pattern: The pattern.

    Attributes:
        at: Index of the next character.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> str:
        """Alternatives up to a closing parenthesis or the end, spelled."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"has groups nested more than {_MAX_DEPTH} deep")
        found = [self._sequence(depth)]
        while self._next_is("|"):
            self.at += 1
            found.append(self._sequence(depth))
        return "|".join(found)

    def _next_is(self, chars: str) -> bool:
        return self.at < len(self.pattern) and self.pattern[self.at] in chars

    def _sequence(self, depth: int) -> str:
        parts = []
        while self.at < len(self.pattern) and not self._next_is("|)"):
            parts.append(self._item(depth) + self._repetition())
        if not parts:
            raise ValueError("has an empty alternative")
        return "".join(parts)

    def _item(self, depth: int) -> str:
        if self._next_is("("):
            return self._group(depth)
        if self._next_is("["):
            return self._class()
        if self.pattern[self.at] in _META - {"\\"}:
            raise ValueError(f"has {self.pattern[self.at]!r}, which dialects read differently")
        return _spelled(self._char(), _META)

    def _group(self, depth: int) -> str:
        self.at += 1
        if self._next_is("?"):
            if not self.pattern.startswith("?:", self.at):
                raise ValueError("has a group with '(?', which dialects read differently")
            self.at += 2
        inner = self.alternatives(depth + 1)
        self._take(")")
        return f"({inner})"

    def _class(self) -> str:
        self._take("[")
        if self._next_is("^"):
            raise ValueError("has a negated class, which dialects read differently")
        parts = []
        while not self._next_is("]"):
            first = self._member()
            part = _spelled(first, _IN_CLASS)
            if self._next_is("-") and not self.pattern.startswith("-]", self.at):
                self.at += 1
                last = self._member()
                if last < first:
                    raise ValueError(f"has a range from {first!r} down to {last!r}")
                part += f"-{_spelled(last, _IN_CLASS)}"
            parts.append(part)
        self._take("]")
        if not parts:
            raise ValueError("has an empty class")
        return f"[{''.join(parts)}]"

    def _member(self) -> str:
        if self._next_is("[&~"):
            raise ValueError(f"has {self.pattern[self.at]!r} in a class, which dialects read differently")
        return self._char()

    def _char(self) -> str:
        """One character, escaped or not."""
        if self.at >= len(self.pattern):
            raise ValueError("ends inside a class")
        char = self.pattern[self.at]
        self.at += 1
        if char != "\\":
            return char
        escaped = self.pattern[self.at : self.at + 1]
        self.at += 1
        if escaped == "x":
            return self._code()
        if escaped in _ESCAPED:
            return _ESCAPED[escaped]
        if escaped and escaped.isascii() and escaped.isprintable() and not escaped.isalnum():
            return escaped
        raise ValueError(f"has \\{escaped}, which dialects read differently")

    def _code(self) -> str:
        end = self.pattern.find("}", self.at)
        digits = self.pattern[self.at + 1 : end]
        if not self._next_is("{") or end < 0 or not 0 < len(digits) <= 6:
            raise ValueError("has \\x without a code in braces")
        self.at = end + 1
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise ValueError(f"has \\x{{{digits}}}, which is no character") from None

    def _repetition(self) -> str:
        start = self.at
        if self._next_is("*+?"):
            self.at += 1
        elif self._next_is("{"):
            self.at = self.pattern.find("}", self.at) + 1 or len(self.pattern)
            first, comma, last = self.pattern[start + 1 : self.at - 1].partition(",")
            numbers = [first, last] if last else [first]
            if not all(one.isascii() and one.isdigit() for one in numbers) or (
                comma and last and int(last) < int(first)
            ):
                raise ValueError(f"has {self.pattern[start : self.at][:20]!r}, which is no repetition")
        found = self.pattern[start : self.at]
        if found and self._next_is("*+?{"):
            raise ValueError("has a repetition of a repetition, or a lazy one")
        return found

    def _take(self, char: str) -> None:
        if not self._next_is(char):
            raise ValueError(f"lacks {char!r}")
        self.at += 1


def _spelled(char: str, meta: frozenset[str]) -> str:
    if char in _SPELLED:
        return _SPELLED[char]
    if not char.isprintable() and char != " ":
        raise ValueError(f"has the character U+{ord(char):04X}")
    return f"\\{char}" if char in meta else char
