"""Stop strings that the end of a growing text may be the beginning of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr, Generic


class BegunStops(Generic[AnyStr]):
    """The longest end of a growing text with which one of some stop strings begins.

    Source: Knuth, Morris and Pratt 1977. A character takes constant time for each stop string,
    whatever their lengths: clients choose those, and have them looked for with each token.

    Args:
        stops: The stop strings, as texts or as UTF-8 bytes, none of them empty; there may be none.
    """

    def __init__(self, stops: Sequence[AnyStr]) -> None:
        self._begun: list[_BegunStop[AnyStr]] = [_BegunStop(stop) for stop in stops]

    @property
    def length(self) -> int:
        """Length of that end; 0 for none. A stop string that is whole there has not begun."""
        return max((one.length for one in self._begun), default=0)

    def append(self, text: AnyStr) -> None:
        """Take more of the text."""
        for one in self._begun:
            one.append(text)


class _BegunStop(Generic[AnyStr]):
    """One of the stop strings.

    Attributes:
        length: Length of the longest proper prefix of it that the text ends with.
    """

    __slots__ = ("_borders", "_stop", "length")

    def __init__(self, stop: AnyStr) -> None:
        self.length = 0
        self._stop: AnyStr = stop
        self._borders = [0]  # of its prefixes, as far as the text has had them: length of the longest proper border

    def append(self, text: AnyStr) -> None:
        """Take more of the text."""
        stop, borders, length = self._stop, self._borders, self.length
        for each in text:
            while length and stop[length] != each:
                length = borders[length - 1]
            length += stop[length] == each
            if length > len(borders):
                self._add_border()
            if length == len(stop):
                length = borders[-1]
        self.length = length

    def _add_border(self) -> None:
        stop, borders = self._stop, self._borders
        newest, count = stop[len(borders)], borders[-1]
        while count and stop[count] != newest:
            count = borders[count - 1]
        borders.append(count + (stop[count] == newest))
