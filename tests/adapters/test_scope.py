"""Thinking sections, in the prompt and generated, with tags of one and several tokens."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ThinkingTracker
from adapters.vocabulary import Vocabulary
from adapters.vocabulary.text_match import TextMatcher

tags = st.sampled_from([([7], [8]), ([7, 1], [8, 2]), ([1, 2], [1, 3]), ([5], [5, 6])])
tokens = st.lists(st.integers(0, 8), max_size=20)


def tracker_of(start, end, special_ids=()):
    """Of tags that are exactly these tokens."""
    matchers = TextMatcher.of_ids(start), TextMatcher.of_ids(end)
    return ThinkingTracker(*matchers, frozenset(special_ids), start)


def feed(tracker, stream):
    return [tracker.accept(token) for token in stream]


def test_tags_belong_to_neither_section() -> None:
    tracker = tracker_of([7], [8])
    assert feed(tracker, [1, 7, 2, 3, 8, 4]) == [False, None, True, True, None, False]


def test_a_section_opened_by_the_prompt() -> None:
    tracker = tracker_of([7], [8])
    tracker.reset([1, 7, 2])
    assert tracker.thinking
    assert tracker.opening_id is None
    tracker.reset([1, 7, 2, 8])
    assert not tracker.thinking
    assert tracker.opening_id is None


@pytest.mark.parametrize(
    ("prompt", "thinking", "may_open"),
    [
        ([], False, True),
        ([1, 2], False, True),
        ([9, 7, 2, 8, 3, 9, 4, 9], False, True),  # an earlier turn thought
        ([9, 7, 2, 9, 4, 9], False, True),  # an earlier turn was cut off while it thought
        ([9, 7, 2, 8, 3, 9, 7], True, False),  # the template opens a section
        ([9, 7, 2, 8, 3, 9, 7, 1, 8, 1], False, False),  # and closes it: the answer begins at once
        ([9, 7, 8, 9, 1, 7, 2, 8, 3, 4], False, False),  # a beginning of the answer is given
    ],
)
def test_only_the_last_turn_of_the_prompt_counts(prompt, thinking, may_open) -> None:
    tracker = tracker_of([7], [8], [9, 7])  # the tags may be special tokens themselves
    tracker.reset(prompt)
    assert (tracker.thinking, tracker.opening_id) == (thinking, 7 if may_open else None)
    tracker.accept(5)
    assert tracker.opening_id is None
    tracker.rewind(0)
    assert (tracker.thinking, tracker.opening_id) == (thinking, 7 if may_open else None)


def test_a_tag_that_starts_in_the_prompt() -> None:
    tracker = tracker_of([7, 1], [8])
    tracker.reset([7])
    assert feed(tracker, [1, 4]) == [None, True]


@settings(max_examples=examples(100), deadline=None)
@given(tag=tags, prompt=tokens, stream=tokens, cut=st.integers(0, 20), tail=tokens)
def test_rewinding_is_as_if_it_had_never_been(tag, prompt, stream, cut, tail) -> None:
    tracker, fresh = tracker_of(*tag), tracker_of(*tag)
    tracker.reset(prompt)
    fresh.reset(prompt)
    feed(tracker, stream)
    tracker.rewind(cut)
    feed(fresh, stream[:cut])
    assert feed(tracker, tail) == feed(fresh, tail)
    assert (tracker.thinking, tracker.opening_id) == (fresh.thinking, fresh.opening_id)


def test_a_tag_needs_ids() -> None:
    with pytest.raises(ValueError, match="an opening and a closing tag"):
        ThinkingTracker.of(Vocabulary(9), [], [8])


def test_an_answer_may_begin_like_the_opening_tag() -> None:
    tracker = tracker_of([7, 1, 2], [8])
    seen = [tracker.opening_id]
    for token in (7, 1, 2, 4):
        tracker.accept(token)
        seen.append(tracker.opening_id)
    assert seen == [7, 1, 2, None, None]
    tracker.rewind(1)
    assert tracker.opening_id == 1
    feed(tracker, [7])
    assert tracker.opening_id is None  # the answer is 7, 7: no beginning of the tag
