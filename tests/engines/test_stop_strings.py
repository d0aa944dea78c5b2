"""Stop strings see text, not tokens: however an answer is cut, the same text and whole tokens are left of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.embedded.stop_strings import AnswerText, IncrementalText

TEXTS = st.text(alphabet="ab é€\U0001f600", max_size=40)
STOPS = st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), max_size=3)
CUTS = st.sets(st.integers(min_value=1, max_value=160))


class Pieces:
    """A vocabulary of byte strings: token i is the i-th piece of `data`."""

    def __init__(self, data: bytes, cuts: set[int]) -> None:
        edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
        self.pieces = [data[start:stop] for start, stop in pairwise(edges)]
        self.ids = list(range(len(self.pieces)))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[one] for one in ids).decode("utf-8", "replace")


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """The stop string that ends first, the longest of those that end together, found one character at a time."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


def run(vocabulary: Pieces, answer: AnswerText) -> list[str]:
    """What has been shown after each token, and at the end."""
    shown = []
    for token_id in vocabulary.ids:
        over = answer.append(token_id)
        shown.append(answer.shown)
        if over:
            return shown
    answer.finish()
    return [*shown, answer.shown if answer.stopped_by is not None else answer.text]


@given(st.binary(max_size=60), CUTS)
def test_pieces_are_the_whole_text(data: bytes, cuts: set[int]) -> None:
    vocabulary = Pieces(data, cuts)
    text = IncrementalText(vocabulary.decode)
    pieces = [text.append(token_id) for token_id in vocabulary.ids]
    assert "".join(pieces) + text.finish() == data.decode("utf-8", "replace")


@given(TEXTS, CUTS, st.integers(min_value=0, max_value=10))
def test_context_is_no_part_of_the_text(text: str, cuts: set[int], split: int) -> None:
    vocabulary = Pieces(text.encode(), cuts)
    context = vocabulary.ids[:split]
    before = vocabulary.decode(context)
    pieces = IncrementalText(vocabulary.decode, context)
    after = "".join(pieces.append(token_id) for token_id in vocabulary.ids[split:]) + pieces.finish()
    if not before.endswith("\ufffd"):
        assert before + after == text


@given(TEXTS, STOPS, CUTS, st.booleans())
def test_any_split_into_tokens_gives_the_same_text(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    vocabulary = Pieces(text.encode(), cuts)
    answer = AnswerText(vocabulary.decode, stops, include=include)
    run(vocabulary, answer)
    found = first_stop(text, stops)
    if found is None:
        assert (answer.text, answer.stopped_by, answer.num_tokens) == (text, None, len(vocabulary.ids))
        return
    start, end = found
    assert answer.stopped_by == text[start:end]
    assert answer.text == text[: end if include else start]


@given(TEXTS, STOPS, CUTS)
def test_tokens_that_stay_hold_no_part_of_the_stop_string(text: str, stops: list[str], cuts: set[int]) -> None:
    vocabulary = Pieces(text.encode(), cuts)
    answer = AnswerText(vocabulary.decode, stops)
    run(vocabulary, answer)
    if answer.stopped_by is not None:
        kept = vocabulary.ids[: answer.num_tokens]
        assert len(vocabulary.decode(kept)) <= len(answer.text)
        assert len(vocabulary.decode(vocabulary.ids[: answer.num_tokens + 1])) > len(answer.text)


@given(TEXTS, STOPS, CUTS)
def test_what_has_been_shown_stays(text: str, stops: list[str], cuts: set[int]) -> None:
    vocabulary = Pieces(text.encode(), cuts)
    answer = AnswerText(vocabulary.decode, stops)
    shown = run(vocabulary, answer)
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert shown == [] or answer.text == shown[-1]


def test_text_is_held_back_while_it_may_begin_a_stop_string() -> None:
    words = ["one", "<", "en", "d", "ing", "<", "end", ">", "never"]
    answer = AnswerText(lambda ids: "".join(words[one] for one in ids), ["<end>"])
    shown = []
    for token_id in range(len(words)):
        if answer.append(token_id):
            break
        shown.append((answer.shown, answer.num_shown_tokens))
    assert shown == [
        ("one", 1),
        ("one", 1),
        ("one", 1),
        ("one", 1),
        ("one<ending", 5),
        ("one<ending", 5),
        ("one<ending", 5),
    ]
    assert (answer.text, answer.num_tokens, answer.stopped_by) == ("one<ending", 5, "<end>")


def test_a_stop_string_before_the_least_length_is_text() -> None:
    answer = AnswerText(lambda ids: "".join("x."[one] for one in ids), ["."], min_tokens=3)
    assert [answer.append(token_id) for token_id in (0, 1, 0, 1)] == [False, False, False, True]
    assert (answer.text, answer.num_tokens) == ("x.x", 3)


@pytest.mark.parametrize(("include", "text", "tokens"), [(False, "a", 1), (True, "ab", 2)])
def test_the_tail_of_a_token_after_the_stop_string_goes(include: bool, text: str, tokens: int) -> None:
    answer = AnswerText(lambda ids: "".join(["a", "bc"][one] for one in ids), ["b"], include=include)
    assert not answer.append(0)
    assert answer.append(1)
    assert (answer.text, answer.num_tokens) == (text, tokens)


def test_a_prompt_that_ends_inside_a_character_is_not_completed() -> None:
    vocabulary = Pieces("é".encode(), {1})
    pieces = IncrementalText(vocabulary.decode, [0])
    assert pieces.append(1) + pieces.finish() == "\ufffd"
