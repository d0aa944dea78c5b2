"""Stop strings see text, not tokens: however an answer is cut, the same text and whole tokens
are left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise

import pytest
from effort import examples, grid
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from worker.text.answer_text import AnswerText
from worker.text.incremental_text import Decode, IncrementalText

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
    """The stop string that ends first, the longest of those that end together, found one
    character at a time.
    """
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


@given(TEXTS, STOPS, CUTS, st.integers(0, 12))
def test_an_answer_that_goes_on_shows_what_it_would_have(
    text: str, stops: list[str], cuts: set[int], num_tokens: int
) -> None:
    """A beginning of a stop string in the tokens before is held back, too."""
    ids = Pieces(text.encode(), cuts).ids
    decode = Pieces(text.encode(), cuts).decode
    whole, resumed = AnswerText(decode, stops), AnswerText(decode, stops)
    if any(whole.append(token_id) for token_id in ids[:num_tokens]):
        return
    resumed.resume(ids[:num_tokens])
    assert resumed.shown == whole.shown
    for token_id in ids[num_tokens:]:
        is_over = whole.append(token_id)
        assert resumed.append(token_id) == is_over
        assert (resumed.shown, resumed.stopped_by) == (whole.shown, whole.stopped_by)
        if is_over:
            return


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
    answer = AnswerText(lambda ids: "".join("x."[one] for one in ids), ["."])
    ends = []
    for token_id, answer.is_too_short in ((0, True), (1, True), (0, False), (1, False)):
        ends.append(answer.append(token_id))
    assert ends == [False, False, False, True]
    assert (answer.text, answer.num_tokens) == ("x.x", 3)


def test_a_stop_string_that_begins_too_early_is_text() -> None:
    """As at Dynamo's frontend. It is held back all the same: another worker may have generated
    tokens before, so that it ends the answer.
    """
    answer = AnswerText(lambda ids: bytes(ids).decode(), ["END"])
    ends, shown = [], []
    for count, token_id in enumerate(b"xENDEND", 1):
        answer.is_too_short = count < 3
        ends.append(answer.append(token_id))
        shown.append(answer.shown)
    assert shown[:4] == ["x", "x", "x", "xEND"]
    assert ends == [False] * 6 + [True]
    assert (answer.text, answer.num_tokens) == ("xEND", 4)


@pytest.mark.parametrize(("include", "text", "tokens"), [(False, "a", 1), (True, "ab", 2)])
def test_the_tail_of_a_token_after_the_stop_string_goes(include: bool, text: str, tokens: int) -> None:
    answer = AnswerText(lambda ids: "".join(["a", "bc"][one] for one in ids), ["b"], include=include)
    assert not answer.append(0)
    assert answer.append(1)
    assert (answer.text, answer.num_tokens) == (text, tokens)


class Counted:
    """A decoder that counts the tokens that it is given, in all and at a time."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self.total = 0
        self.most = 0

    def __call__(self, ids: list[int]) -> str:
        self.total += len(ids)
        self.most = max(self.most, len(ids))
        return self._decode(ids)


BYTES = range(256)
SPECIAL = 256
WORD = 257
LEADING = 258


def byte_level(ids: Sequence[int]) -> str:
    """A token for each byte; one that stands for none; a word; and one of a word and a byte that
    begins a character.
    """
    tokens = [*(bytes([one]) for one in BYTES), b"", b" word", b" w\xf0"]
    return b"".join(tokens[one] for one in ids).decode("utf-8", "replace")


def byte_fallback() -> Decode:
    """As tokenizers made by SentencePiece decode: a run of bytes is text if all of it is, or
    U+FFFD for each byte.
    """
    vocabulary = {f"<0x{one:02X}>": one for one in BYTES} | {"<s>": SPECIAL, "\u2581word": WORD, "\u2581w": LEADING}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer.decode


UNFINISHED = {
    "stray bytes": [0x80],
    "beginnings": [0xE2, 0x82],
    "every byte": [0xFF, *range(0x80, 0x100)],
    "special tokens inside a character": [0xF0, 0x9F, *[SPECIAL] * 60],
    "a stray byte, then letters": [WORD, 0x80, *[0x41] * 5000],
    "a stray byte, then whole characters": [WORD, 0x80, *[0xE2, 0x82, 0xAC] * 2000],
    "words that end inside a character": [LEADING],
}


@pytest.mark.parametrize("kind", grid(UNFINISHED, fast=2))
@pytest.mark.parametrize("decode", [byte_level, byte_fallback()], ids=["bytes", "fallback"])
def test_text_that_never_completes_a_character_takes_linear_time(decode: Decode, kind: str) -> None:
    totals = []
    for count in (1000, 4000):
        ids = [*(UNFINISHED[kind] * count)[:count], 0x20, WORD]
        counted = Counted(decode)
        text = IncrementalText(counted)
        pieces = [text.append(token_id) for token_id in ids]
        assert "".join(pieces) + text.finish() == decode(ids)
        assert counted.most <= 64
        totals.append(counted.total / len(ids))
    assert max(totals) < 120


RUNS = st.lists(
    st.one_of(
        st.sampled_from([0x41, 0x80, 0xAC, 0xE2, 0x82, 0xF0, 0x9F, 0x98, 0xC3, 0xFF]),
        st.sampled_from([SPECIAL, WORD, LEADING]),
    ),
    max_size=12,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(RUNS, st.integers(1, 40)), max_size=6), st.integers(1, 3))
def test_any_bytes_give_the_whole_text(parts: list[tuple[list[int], int]], together: int) -> None:
    ids = [token_id for run, count in parts for token_id in run * count][:600]
    counted = Counted(byte_level)
    text = IncrementalText(counted)
    pieces = [text.append(*ids[start : start + together]) for start in range(0, len(ids), together)]
    assert "".join(pieces) + text.finish() == byte_level(ids)
    assert counted.most <= 64


MIXED = st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0x80, WORD, LEADING]), min_size=1, max_size=60)


@pytest.mark.parametrize("decode", [byte_level, byte_fallback()], ids=["bytes", "fallback"])
@settings(max_examples=examples(300), deadline=None)
@given(ids=MIXED, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10))
@example(ids=[*[0xC3, 0xA9] * 20, 0x80], sizes=[40])  # a long run of bytes, of which the window has the last
def test_tokens_that_come_together_give_the_same_text(decode: Decode, ids: list[int], sizes: list[int]) -> None:
    """As drafted ones do, and those of an answer that is read at its end: a stray byte behind a
    whole character took that back if it came with it.
    """
    single, grouped = IncrementalText(decode), IncrementalText(decode)
    expected = "".join([single.append(token_id) for token_id in ids]) + single.finish()
    made, start = "", 0
    for size in cycle(sizes):
        made += grouped.append(*ids[start : start + size])
        start += size
        if start >= len(ids):
            break
    assert made + grouped.finish() == expected
    whole = AnswerText(decode)
    for token_id in ids:
        whole.append(token_id)
    whole.finish()
    assert whole.text == expected


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(RUNS, st.integers(1, 20)), max_size=5))
def test_bytes_after_a_stray_one_give_the_whole_text(
    parts: list[tuple[list[int], int]],
) -> None:
    """Runs that begin with a stray byte: of others, whole characters that were given out would
    be taken back.
    """
    decode = byte_fallback()
    ids: list[int] = []
    for run, count in parts:
        ids += [WORD, 0x80, *(token_id for token_id in run * count if token_id < SPECIAL)]
    text = IncrementalText(decode)
    pieces = [text.append(token_id) for token_id in ids]
    assert "".join(pieces) + text.finish() == decode(ids)


@pytest.mark.parametrize("num_special", [1, 8, 16, 17, 100])
def test_a_space_behind_tokens_without_a_text_stays(num_special: int) -> None:
    """Tokenizers drop one at the beginning of a text, and the window had nothing else in it."""
    counted = Counted(byte_fallback())
    ids = [WORD] * 9 + [SPECIAL] * num_special + [WORD] + [SPECIAL] * num_special + [WORD]
    text = IncrementalText(counted)
    pieces = [text.append(token_id) for token_id in ids]
    assert "".join(pieces) + text.finish() == byte_fallback()(ids) == " ".join(["word"] * 11)
    assert counted.most <= 64


@pytest.mark.parametrize("num_special", [0, 5, 6, 100])
@pytest.mark.parametrize("num_words", [0, 1, 9])
def test_a_space_behind_such_tokens_of_a_prompt_stays(num_words: int, num_special: int) -> None:
    """The context had nothing else in it, behind the places of pictures for one."""
    decode = byte_fallback()
    prompt = [WORD] * num_words + [SPECIAL] * num_special
    counted = Counted(decode)
    text = IncrementalText(counted, prompt)
    pieces = [text.append(WORD) for _ in range(40)]
    assert decode(prompt) + "".join(pieces) == decode(prompt + [WORD] * 40)
    counted.most = 0
    assert text.append(WORD) == " word"
    assert counted.most <= 64


def test_a_stop_string_is_found_behind_stray_bytes() -> None:
    answer = AnswerText(byte_level, ["A\ufffd", "BC"])
    ids = [*[0x80] * 500, 0x41, 0x42, 0x43]
    assert [answer.append(token_id) for token_id in ids] == [False] * 502 + [True]
    assert (answer.text, answer.stopped_by, answer.num_tokens) == ("\ufffd" * 500 + "A", "BC", 501)


def test_a_prompt_that_ends_inside_a_character_is_not_completed() -> None:
    vocabulary = Pieces("é".encode(), {1})
    pieces = IncrementalText(vocabulary.decode, [0])
    assert pieces.append(1) + pieces.finish() == "\ufffd"
