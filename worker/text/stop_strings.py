"""Stop strings in a growing text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr, Generic


class StopStrings(Generic[AnyStr]):
    """Matches the stop strings of one answer, as texts or as UTF-8 bytes.

    Args:
        stops: The stop strings, none of them empty; there may be none.
    """

    def __init__(self, stops: Sequence[AnyStr]) -> None:
        self._stops: tuple[AnyStr, ...] = tuple(stops)
        self._reach = max(map(len, self._stops), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._stops)

    def tail(self, text: AnyStr) -> AnyStr:
        """The end of `text` in which a stop string may begin that later text completes."""
        return text[-self._reach :] if self._reach else text[:0]

    def first(self, text: AnyStr, after: int = 0, begin: int = 0) -> tuple[int, int] | None:
        """Start and end of the stop string in `text` that ends first; None if there is none.

        The longest counts where several end together.

        Args:
            text: The text.
            after: Offset in `text`; stop strings that end there or before are ignored.
            begin: Offset in `text`; stop strings that begin before it are ignored.
        """
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = text.find(stop, max(begin, after + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        end, start = min(found, default=(-1, -1))
        return None if end < 0 else (start, end)
