"""Thinking sections, in the prompt and generated, with tags of one and several tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ThinkingTracker

tags = st.sampled_from([([7], [8]), ([7, 1], [8, 2]), ([1, 2], [1, 3]), ([5], [5, 6])])
tokens = st.lists(st.integers(0, 8), max_size=20)


def feed(tracker, stream):
    return [tracker.accept(token) for token in stream]


def test_tags_belong_to_neither_section():
    tracker = ThinkingTracker([7], [8])
    assert feed(tracker, [1, 7, 2, 3, 8, 4]) == [False, None, True, True, None, False]


def test_a_section_opened_by_the_prompt():
    tracker = ThinkingTracker([7], [8])
    tracker.reset([1, 7, 2])
    assert tracker.thinking
    assert not tracker.may_open
    tracker.reset([1, 7, 2, 8])
    assert not tracker.thinking
    assert not tracker.may_open


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
def test_only_the_last_turn_of_the_prompt_counts(prompt, thinking, may_open):
    tracker = ThinkingTracker([7], [8], frozenset([9, 7]))  # the tags may be special tokens themselves
    tracker.reset(prompt)
    assert (tracker.thinking, tracker.may_open) == (thinking, may_open)
    tracker.accept(5)
    assert not tracker.may_open
    tracker.rewind(0)
    assert (tracker.thinking, tracker.may_open) == (thinking, may_open)


def test_a_tag_that_starts_in_the_prompt():
    tracker = ThinkingTracker([7, 1], [8])
    tracker.reset([7])
    assert feed(tracker, [1, 4]) == [None, True]


@settings(max_examples=100, deadline=None)
@given(tag=tags, prompt=tokens, stream=tokens, cut=st.integers(0, 20), tail=tokens)
def test_rewinding_is_as_if_it_had_never_been(tag, prompt, stream, cut, tail):
    tracker, fresh = ThinkingTracker(*tag), ThinkingTracker(*tag)
    tracker.reset(prompt)
    fresh.reset(prompt)
    feed(tracker, stream)
    tracker.rewind(cut)
    feed(fresh, stream[:cut])
    assert feed(tracker, tail) == feed(fresh, tail)
    assert (tracker.thinking, tracker.may_open) == (fresh.thinking, fresh.may_open)
