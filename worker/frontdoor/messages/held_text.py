"""Text of a stream, without the stop sequence that may end it."""

from __future__ import annotations

from collections.abc import Sequence


class HeldText:
    """Holds back the end of a growing text in which a stop sequence may begin, or is complete.

    A complete one is cut only at the end of an answer that stopped there: one that was generated
    before ``min_tokens`` ends nothing.

    Args:
        stops: The stop sequences, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """Take more of the text; what of it can be shown."""
        whole = self._held + text
        shown = len(whole) - self._num_held(whole)
        self._held = whole[shown:]
        return whole[:shown]

    def release(self) -> str:
        """The rest, which other content follows, or the end of an answer that did not stop here."""
        held, self._held = self._held, ""
        return held

    def stop(self) -> tuple[str, str | None]:
        """The rest without the stop sequence at its end, and that; the longest of several."""
        held = self.release()
        found = max((stop for stop in self._stops if held.endswith(stop)), key=len, default=None)
        return held if found is None else held[: len(held) - len(found)], found

    def _num_held(self, text: str) -> int:
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
