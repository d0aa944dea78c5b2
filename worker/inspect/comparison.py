"""Two answers, aligned."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from worker.inspect.recording import Recording


def shared_places(recordings: Sequence[Recording]) -> list[set[int]]:
    """Places of the tokens of each answer that the other one has too, in the same order.

    A single answer shares all of them.
    """
    if len(recordings) == 1:
        return [set(range(len(recordings[0].positions)))]
    first, second = recordings
    shared: list[set[int]] = [set(), set()]
    for block in SequenceMatcher(None, first.token_ids, second.token_ids, autojunk=False).get_matching_blocks():
        shared[0] |= set(range(block.a, block.a + block.size))
        shared[1] |= set(range(block.b, block.b + block.size))
    return shared


def first_difference(recordings: Sequence[Recording]) -> int | None:
    """The place of the first token that differs; None if all are equal, or there is one answer."""
    if len(recordings) == 1 or recordings[0].token_ids == recordings[1].token_ids:
        return None
    first, second = (each.token_ids for each in recordings)
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def summary(recordings: Sequence[Recording]) -> str | None:
    """One line about two answers, None of one."""
    if len(recordings) == 1:
        return None
    place = first_difference(recordings)
    if place is None:
        return f"A and B: equal, {len(recordings[0].token_ids)} tokens"
    position = recordings[0].prompt_length + place
    return f"A and B: equal up to position {position}, step {place + 1}"
