"""Characters that are split over tokens: what is open, and what keeps room for its end."""

from __future__ import annotations

import pickle

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.processors.characters import SplitCharacters, begun, num_missing, split_characters
from adapters.testing.kit_model import kit_vocabulary
from adapters.vocabulary import Vocabulary

PIECES = [
    b"",  # special
    *(bytes([byte]) for byte in range(256)),
    b"a\xf0\x9f",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x80\xf0",
    b"\x80\xe4\xb8",
    b"\x80\x80\x80",
    "é中".encode(),
    b"\xe4",
]
SPLIT = SplitCharacters(PIECES)


def open_by_decoding(data: bytes) -> bytes:
    """The shortest end of ``data`` that some bytes would make a character, and that is none."""
    for count in (1, 2, 3):
        tail = data[-count:]
        if len(tail) < count:
            return b""
        for rest in range(1, 4):
            for lowest in (0x80, 0x90, 0xA0):
                for filler in (b"\x80", b"\xbf"):
                    whole = tail + bytes([lowest]) + filler * (rest - 1)
                    try:
                        if len(whole.decode()) == 1:
                            return tail
                    except UnicodeDecodeError:
                        continue
    return b""


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.sampled_from([0x41, 0x80, 0x98, 0x9F, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xF5])))
def test_what_is_begun_is_what_could_become_a_character(data) -> None:
    assert begun(bytes(data)) == open_by_decoding(bytes(data))


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=9), st.integers(0, 9))
def test_the_last_tokens_tell_what_is_open(tokens, begin) -> None:
    data = b""
    for token in tokens[begin:]:
        data = data + PIECES[token] if PIECES[token] else b""
    assert SPLIT.open_after(tokens, begin) == begun(data)
    assert SPLIT.open_after([*tokens, 5], begin, len(tokens)) == begun(data)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(["", "😀", "中", "é", "\U0010ffff"]), st.integers(0, 3), st.integers(0, 5))
def test_room_is_kept_for_the_missing_bytes(character, cut, left) -> None:
    beginning = begun(character.encode()[:cut])
    ban = SPLIT.room(beginning, left)
    banned = set() if ban is None else set(ban.token_ids.tolist())
    most = max(left, num_missing(beginning)) - 1
    if most < 0:
        assert not banned
        return
    expected = {
        i for i, piece in enumerate(PIECES) if piece and num_missing(begun(beginning + piece)) > most
    }  # a special token leaves nothing open
    assert banned == expected


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=8, max_size=8), st.integers(0, 3), st.integers(0, 6))
def test_the_character_is_whole_when_the_tokens_are_used_up(picks, cut, num_left) -> None:
    """Whatever is chosen among what is left, and however late the count was begun."""
    tokens = [i + 1 for i in "😀".encode()[:cut]]
    for left in range(max(num_left, num_missing(SPLIT.open_after(tokens))), 0, -1):
        ban = SPLIT.room(SPLIT.open_after(tokens), left)
        banned = set() if ban is None else set(ban.token_ids.tolist())
        kept = [i for i in range(1, len(PIECES)) if i not in banned]
        tokens.append(kept[picks[left] % len(kept)])
    assert not SPLIT.open_after(tokens)


def test_far_from_the_end_and_without_bytes_nothing_is_masked() -> None:
    assert SPLIT.room(b"", 4) is None
    assert SPLIT.room(b"", 0) is None
    assert SplitCharacters(()).room(b"", 1) is None
    assert not SplitCharacters(()).open_after([1, 2])
    assert split_characters(Vocabulary(10)).room(b"", 1) is None
    assert SPLIT.room(b"", 2) is SPLIT.room(b"", 2)


@pytest.mark.parametrize("original", [SPLIT, split_characters(kit_vocabulary())])
def test_a_copy_knows_the_same(original) -> None:
    copy = pickle.loads(pickle.dumps(original))
    for beginning in (b"", b"\xf0\x9f", b"\xe4"):
        for left in range(4):
            ban, other = original.room(beginning, left), copy.room(beginning, left)
            assert (ban is None) == (other is None)
            assert ban is None or ban.token_ids.tolist() == other.token_ids.tolist()


def test_a_copy_of_a_vocabulary_with_a_path_travels_light() -> None:
    assert len(pickle.dumps(split_characters(kit_vocabulary()))) < 300
