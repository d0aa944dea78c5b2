"""Text of a stream, without the stop sequence that may end it."""

from __future__ import annotations

from collections.abc import Sequence

from worker.text.begun_stops import BegunStops


class HeldText:
    """Holds back the end of a growing text in which a stop sequence may begin, or is complete.

    A complete one is cut only at the end of an answer that stopped there: one that was generated
    before ``min_tokens`` ends nothing.

    Args:
        stops: The stop sequences, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._begun = BegunStops(stops)
        self._held = ""

    def add(self, text: str) -> str:
        """Take more of the text; what of it can be shown."""
        whole = self._held + text
        self._begun.append(text)
        complete = max((len(stop) for stop in self._stops if whole.endswith(stop)), default=0)
        shown = len(whole) - max(complete, self._begun.length)
        self._held = whole[shown:]
        return whole[:shown]

    def release(self) -> str:
        """The rest, which other content follows, or the end of an answer that did not stop here."""
        held, self._held = self._held, ""
        self._begun = BegunStops(self._stops)
        return held

    def stop(self) -> tuple[str, str | None]:
        """The rest without the stop sequence at its end, and that; the longest of several."""
        held = self.release()
        found = max((stop for stop in self._stops if held.endswith(stop)), key=len, default=None)
        return held if found is None else held[: len(held) - len(found)], found
