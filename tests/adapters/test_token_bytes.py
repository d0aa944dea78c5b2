"""Bytes of tokens, on small real tokenizers of each kind, trained in memory."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
from effort import examples
from growth import num_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from adapters.testing.kit_model import kit_vocabulary
from adapters.vocabulary import ByteIndex, Vocabulary, byte_index, token_bytes

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Привет, мир! 中文 と 日本語",
    "the the fox fox\nquick: brown",
] * 4
TEXTS = st.text(max_size=40).filter(lambda text: "<|end|>" not in text and "<tool>" not in text)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
BYTE_LEVEL_BYTES, SENTENCEPIECE_BYTES = token_bytes(BYTE_LEVEL, 400), token_bytes(SENTENCEPIECE, 320)


@given(st.text(st.sampled_from("aĠĀÿŃ\x00 \x7f\xa0\xadń世\U0001f600") | st.characters(codec="utf-8"), min_size=1))
@settings(max_examples=examples(50), deadline=None)
def test_byte_level_letters_are_bytes_or_text(piece: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
    tokenizer.decoder = decoders.ByteLevel()
    [found] = token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 1)
    if set(piece) <= set(pre_tokenizers.ByteLevel.alphabet()):
        assert found.decode(errors="replace") == decoders.ByteLevel().decode([piece])
        assert len(found) == len(piece)
    else:
        assert found == piece.encode()


@given(TEXTS)
@settings(max_examples=examples(100), deadline=None)
def test_byte_level_pieces_join_to_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert b"".join(BYTE_LEVEL_BYTES[i] for i in ids) == text.encode()


@given(st.text(max_size=40).filter(lambda t: not any(tag in t for tag in ("<unk>", "</s>", "▁", "<0x"))))
@settings(max_examples=examples(100), deadline=None)
def test_sentencepiece_pieces_join_to_the_text_behind_a_space(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    joined = b"".join(SENTENCEPIECE_BYTES[i] for i in ids)
    # Metaspace prepends its space unless the text begins with one.
    assert joined == (text if not text or text.startswith(" ") else f" {text}").encode()


def test_single_bytes_of_a_character_stay_single() -> None:
    ids = SENTENCEPIECE.encode("語", add_special_tokens=False)
    assert [SENTENCEPIECE_BYTES[i] for i in ids[1:]] == [bytes([byte]) for byte in "語".encode()]


def test_special_tokens_have_no_bytes_and_added_tokens_have_text() -> None:
    assert BYTE_LEVEL_BYTES[BYTE_LEVEL.convert_tokens_to_ids("<|end|>")] == b""
    assert BYTE_LEVEL_BYTES[BYTE_LEVEL.convert_tokens_to_ids("<tool>")] == b"<tool>"
    assert BYTE_LEVEL_BYTES[len(BYTE_LEVEL) :] == [b""] * (400 - len(BYTE_LEVEL))
    assert len(BYTE_LEVEL_BYTES) == 400
    assert SENTENCEPIECE_BYTES[:2] == [b"", b""]


def test_every_byte_level_token_that_is_not_special_has_bytes() -> None:
    special = set(BYTE_LEVEL.all_special_ids)
    assert all(BYTE_LEVEL_BYTES[i] for i in range(len(BYTE_LEVEL)) if i not in special)


def test_a_row_narrower_than_the_tokenizer_is_cut() -> None:
    assert token_bytes(BYTE_LEVEL, 100) == BYTE_LEVEL_BYTES[:100]


def test_wordpiece_marks_words_by_a_space() -> None:
    tokenizer = wordpiece()
    pieces = token_bytes(tokenizer, len(tokenizer))
    ids = tokenizer.encode("the quick foxes", add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    assert b"".join(pieces[i] for i in ids) == b" the quick foxes"


DECODERS = {
    "WordPiece": decoders.WordPiece(),
    "WordPiece without clean-up": decoders.WordPiece(cleanup=False),
    "WordPiece of another prefix": decoders.WordPiece(prefix="@@"),
    "none": None,
    "Fuse": decoders.Fuse(),
    "Metaspace": decoders.Metaspace(),
    "bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "spaces and bytes": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "bytes and a pattern of spaces": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("▁"), " ")]
    ),
    "bytes and spaces": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(replacement="_")]),
    "ByteLevel": decoders.ByteLevel(),
}
PIECES = ["a", ",", ".", "'s", "n't", "##b", "##", "@@c", "▁d", "▁▁", "_d", "<0x41>", "<0x7a>", "ĠŃ", "中", " e"]
PLACES = st.lists(st.integers(0, len(PIECES) + 1), max_size=6)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=examples(60), deadline=None)
@given(places=PLACES)
def test_tokens_behind_another_are_the_text_of_the_decoder(name: str, places: list[int]) -> None:
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"))
    if DECODERS[name] is not None:
        tokenizer.decoder = DECODERS[name]
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("▁x", lstrip=True)])
    found = token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), len(PIECES) + 2)
    said = b"".join(found[place] for place in places).decode(errors="replace")
    assert tokenizer.decode([0, *places]) == f"a{said}"


def test_end_of_word_suffixes_become_spaces() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 2) == [b"a", b"b "]


class _Plain:
    """A tokenizer of which only ids and pieces are known."""

    def __init__(self, pieces: list[str | bytes]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | bytes]:
        return [self.pieces[i] for i in ids]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"{self.pieces[i]}!" for i in ids)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["Ġ", "Ċ", "Ā", "Ġa"], [b" ", b"\n", b"\0", b" a"]),
        (["▁a", "<0x0A>", "b"], [b" a", b"\n", b"b"]),
        (["a", "b"], [b"a!", b"b!"]),
        ([b"\xe4", b"\xb8\xad"], [b"\xe4", b"\xb8\xad"]),
    ],
)
def test_without_a_decoder_the_pieces_tell_the_kind(pieces: list[str | bytes], expected: list[bytes]) -> None:
    assert token_bytes(_Plain(pieces), len(pieces)) == expected  # type: ignore[arg-type]


TOKENS = st.lists(st.text("ab<>", max_size=3).map(str.encode), min_size=1, max_size=12)
NEEDLE = st.text("ab<>", min_size=1, max_size=5).map(str.encode)


@given(TOKENS, NEEDLE)
@settings(max_examples=examples(300), deadline=None)
def test_index_finds_what_a_scan_finds(tokens: list[bytes], text: bytes) -> None:
    index = ByteIndex(tokens)
    assert [index[i] for i in range(len(tokens))] == tokens
    check_search(index, tokens, text)


def check_search(index: ByteIndex, tokens: list[bytes], text: bytes) -> None:
    assert index.containing(text) == [i for i, token in enumerate(tokens) if text in token]
    touching = set()
    for i, token in enumerate(tokens):
        placed = [text[begin:] for begin in range(1, len(text))]
        ends = any(token.endswith(text[:n]) for n in range(1, len(text)))
        begins = any(token.startswith(rest) for rest in placed)
        within = any(rest.startswith(token) for rest in placed)
        if token and (text in token or ends or begins or within):
            touching.add(i)
    assert index.touching(text) == {i: tokens[i] for i in sorted(touching)}


def spelled_by_definition(tokens: list[bytes], text: bytes) -> list[int] | None:
    """The spelling with the fewest tokens; in ties that whose first one is longest, and lowest."""
    found: list[list[int] | None] = [[]]
    for length in range(1, len(text) + 1):
        rest = text[len(text) - length :]
        tails = ((i, found[length - len(token)]) for i, token in enumerate(tokens) if token and rest.startswith(token))
        ways = [[i, *tail] for i, tail in tails if tail is not None]
        found.append(min(ways, key=lambda ids: (len(ids), -len(tokens[ids[0]]), ids[0]), default=None))
    return found[-1]


WORDS = [bytes(letters) for length in range(1, 6) for letters in product(b"ab", repeat=length)]
VOCABULARIES = [
    *([word] for word in WORDS[:30]),
    *([b"", *WORDS[:count], b"", *WORDS[:count]] for count in (2, 6, 14, 30)),
    WORDS[30::-1],
]


@pytest.mark.parametrize("tokens", VOCABULARIES, ids=len)
def test_index_of_short_words_is_what_a_scan_finds(tokens: list[bytes]) -> None:
    index = ByteIndex(tokens)
    assert [index[i] for i in (-2, -1, len(tokens))] == [b""] * 3
    for text in WORDS:
        check_search(index, tokens, text)
        assert index.spell(text) == spelled_by_definition(tokens, text)
        most = index.beginnings.most_within(text)
        assert most is None or most >= sum(bool(token) and text.startswith(token) for token in tokens)
        assert most is None or not any(token.startswith(text) and token != text for token in tokens)


def test_one_long_token_makes_no_text_slow() -> None:
    """Each part of the text that was as short as it was looked for."""
    index = ByteIndex([b"x" * 2000, b"a", b"ab"])
    assert num_lines(lambda: index.touching(b"ab" * 1000)) < 100_000


@given(TOKENS, NEEDLE)
@settings(max_examples=examples(200), deadline=None)
def test_spelling_takes_the_fewest_tokens_or_none(tokens: list[bytes], text: bytes) -> None:
    spelled = ByteIndex(tokens).spell(text)
    counts = [0, *[None] * len(text)]
    for end in range(1, len(text) + 1):
        before = [counts[end - len(t)] for t in tokens if t and text[:end].endswith(t)]
        counts[end] = min((count + 1 for count in before if count is not None), default=None)
    assert (None if spelled is None else len(spelled)) == counts[-1]
    assert spelled is None or b"".join(tokens[i] for i in spelled) == text


def test_spelling_backtracks_where_the_longest_token_fails() -> None:
    assert ByteIndex([b"ab", b"abc", b"cd"]).spell(b"abcd") == [0, 2]
    assert ByteIndex([b"a", b"ab", b"bc", b"c"]).spell(b"abc") == [1, 3]
    assert ByteIndex([b"ab"]).spell(b"") == []


def test_the_index_of_a_vocabulary_with_a_path_travels_light() -> None:
    index = byte_index(kit_vocabulary())
    data = pickle.dumps(index)
    assert len(data) < 300
    assert pickle.loads(data) is index


def test_index_is_made_once_and_pickles_without_its_dictionary() -> None:
    vocabulary = Vocabulary(400, BYTE_LEVEL)
    index = byte_index(vocabulary)
    assert byte_index(vocabulary) is index
    assert index.ids[b"<tool>"]
    copy = pickle.loads(pickle.dumps(index))
    assert [copy[i] for i in range(-1, 401)] == [b"", *BYTE_LEVEL_BYTES, b""]
    assert copy.ids == index.ids
