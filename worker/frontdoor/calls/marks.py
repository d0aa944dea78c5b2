"""Marks that end free text: where a block of calls begins, a message of a channel, or a token that
is no text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from adapters.calls import CallFormat, Opening


class Marks:
    """The texts that end free text, and how much of a text may be the beginning of one.

    Args:
        texts: The marks.

    Attributes:
        pattern: Matches any of them, the longest where several begin.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        marks = sorted(set(texts), key=len, reverse=True)
        self._longest = max(map(len, marks), default=0)
        self._begun = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self.pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    def at_start_of(self, text: str) -> str:
        """The mark with which ``text`` begins; empty if it begins with none."""
        found = self.pattern.match(text)
        return "" if found is None else found.group()

    def may_begin(self, text: str) -> bool:
        """Whether more text could make ``text`` a mark."""
        return not text or text in self._begun

    def held_back(self, text: str) -> int:
        """Characters at the end of ``text`` that may be the beginning of a mark."""
        longest = min(self._longest - 1, len(text))
        return next((length for length in range(longest, 0, -1) if text[-length:] in self._begun), 0)


def held_back(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``mark``."""
    return next(length for length in range(len(mark) - 1, -1, -1) if text.endswith(mark[:length]))


NO_MARKS = Marks(())
"""Marks of free text that nothing but the end of the answer ends."""


@lru_cache(8)
def marks_of(texts: frozenset[str]) -> Marks:
    """The marks ``texts``, kept for the next answer: a model may have a thousand special tokens."""
    return Marks(texts)


def openings_by_mark(format: CallFormat, names: Collection[str], *, anywhere: bool) -> dict[str, Opening]:
    """The openings of blocks by the texts that tell them from free text.

    Args:
        format: Spelling of calls.
        names: Names of the tools.
        anywhere: Openings that may follow text if true, those that begin an answer otherwise.
    """
    return {
        trigger: opening
        for opening in format.openings
        if opening.anywhere is anywhere
        for trigger in format.triggers(opening, names)
    }
