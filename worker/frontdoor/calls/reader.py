"""Reading of a text that comes in parts: generators that yield while they need more of it."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that yields whenever it needs more text, and returns what it has read."""


class Mismatch(Exception):
    """The text is not what it would have to be."""


class Cut(Exception):
    """The text ends before what would have to follow."""


class TextReader:
    """A text that comes in parts, and a position in it.

    Attributes:
        position: Index in the text that is kept; what is before it has been read.
        ended: Whether the text is complete.
    """

    def __init__(self) -> None:
        self._text = ""
        self._absent: dict[str, tuple[int, int]] = {}  # positions between which a text has been looked for in vain
        self.position = 0
        self.ended = False

    def add(self, text: str) -> None:
        """Take the next part."""
        self._text += text

    def forget(self) -> None:
        """Keep no text before the position, once that is most of it; positions change."""
        if 2 * self.position >= len(self._text):
            self._text = self._text[self.position :]
            self._absent.clear()
            self.position = 0

    @property
    def ahead(self) -> str:
        """All text that has come and has not been read."""
        return self._text[self.position :]

    def take(self, count: int) -> str:
        """The next ``count`` characters, which have come."""
        start, self.position = self.position, self.position + count
        return self._text[start : self.position]

    def matched(self, pattern: re.Pattern[str]) -> str:
        """The match of ``pattern`` here in the text that has come, which is read; may be empty."""
        found = pattern.match(self._text, self.position)
        return "" if found is None else self.take(found.end() - found.start())

    def search(self, pattern: re.Pattern[str]) -> tuple[int, str] | None:
        """Characters before the first match of ``pattern`` from here on, and the match, which stay
        unread; None if there is none in the text that has come.
        """
        found = pattern.search(self._text, self.position)
        return None if found is None else (found.start() - self.position, found.group())

    def find(self, text: str) -> int:
        """Characters before ``text`` from here on, -1 if it has not come. Nothing is looked at
        twice for it, not even where several readings begin before it.
        """
        start, end = self._absent.get(text, (0, 0))
        begin = end - len(text) + 1
        if not start <= self.position <= begin:
            start = begin = self.position
        found = self._text.find(text, begin)
        if found < 0:
            self._absent[text] = start, len(self._text)
            return -1
        return found - self.position

    def peek(self) -> Reading[str]:
        """The next character, which stays unread. Raises `Cut`."""
        while self.position >= len(self._text):
            if self.ended:
                raise Cut
            yield
        return self._text[self.position]

    def one_of(self, texts: Sequence[str]) -> Reading[str]:
        """The first of ``texts`` that follows here, which is read.

        A text waits until those before it cannot follow any more.

        Raises:
            Mismatch: none of them follows.
            Cut: the text ends where one of them could.
        """
        while True:
            length = max(map(len, texts))
            ahead = self._text[self.position : self.position + length]
            waits = False
            for text in texts:
                if ahead.startswith(text):
                    if not waits:
                        self.position += len(text)
                        return text
                elif text.startswith(ahead) and not self.ended:
                    waits = True
            if waits:
                yield
            elif any(text.startswith(ahead) for text in texts):
                raise Cut
            else:
                raise Mismatch

    def digits(self, most: int) -> Reading[str]:
        """The next digits, from one to `most`, which are read. Raises `Mismatch`, `Cut`."""
        found = ""
        while len(found) < most and (yield from self.peek()) in "0123456789":
            found += self.take(1)
        if not found:
            raise Mismatch
        return found

    def first_of(self, texts: Sequence[str]) -> Reading[str]:
        """The text that `one_of` reads, which stays unread. Raises `Mismatch`, `Cut`."""
        found = yield from self.one_of(texts)
        self.position -= len(found)
        return found

    def has_more(self) -> Reading[bool]:
        """Whether anything follows."""
        try:
            yield from self.peek()
        except Cut:
            return False
        return True
