"""How much of the end of a growing text may be the beginning of a stop string."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker.text.begun_stops import BegunStops

PARTS = st.lists(st.text("ab", max_size=7), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=9), max_size=4)


def longest_begun(text: str, stops: list[str]) -> int:
    """The same by comparing every end of the text with every beginning."""
    begun = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    return max(begun, default=0)


@given(PARTS, STOPS)
def test_the_longest_end_that_is_a_beginning_is_found(parts: list[str], stops: list[str]) -> None:
    as_text, as_bytes = BegunStops(stops), BegunStops([stop.encode() for stop in stops])
    text = ""
    for part in parts:
        text += part
        as_text.append(part)
        as_bytes.append(part.encode())
        assert as_text.length == as_bytes.length == longest_begun(text, stops)


class Counted(str):
    """A text that counts how often its characters are looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> str:
        self.num_looks += 1
        return super().__getitem__(index)


def test_a_character_takes_constant_time_for_any_stop_string() -> None:
    stop = Counted("a" * 5000 + "b" + "a" * 5000)
    begun = BegunStops([stop])
    text = ("a" * 4999 + "c" + "a" * 5001 + "b") * 2
    for start in range(0, len(text), 3):
        begun.append(text[start : start + 3])
        assert begun.length >= 0
    assert stop.num_looks < 6 * len(text)
