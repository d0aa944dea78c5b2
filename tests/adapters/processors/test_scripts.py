"""Bans of scripts against a decoder that is fed the history byte by byte, and a table of every
character.
"""

from __future__ import annotations

import codecs
import pickle
from functools import cache

import pytest
import regex
import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vocab_for_tests import END, PADDING, assert_rows_equal, context, replayed, run_row, step_by_step, vocabulary

from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context
from adapters.processors.scripts import BanScripts
from adapters.vocabulary import Vocabulary


class Bytes:
    """A tokenizer whose tokens are given as bytes: every byte, and tokens that cut and mix
    characters.
    """

    special = "<s>"

    def __init__(self) -> None:
        whole = ["the", " fox", "中", "中文", "の", "かx", "Ж", "жд", "a中", "。", "🦊", "𠀀", "é", "́", "가", "12"]
        cut = ["中".encode()[:2], "中".encode()[1:], "文".encode()[2:] + b" x", "Ж".encode()[1:] + "中".encode()[:1]]
        cut += ["🦊".encode()[:3], "🦊".encode()[2:], "𠀀".encode()[:2], "𠀀".encode()[1:], b"\x80\x80\x80a", b"\xff"]
        cut += [b"a\xe4", b"\xe4\xb8\xe4", b"\xf0", b"\xbf\xbf", "の".encode()[:2], "文".encode()[1:] + b"\xf0\xa0"]
        self.pieces = [bytes([byte]) for byte in range(256)] + [text.encode() for text in whole] + cut
        self.all_special_ids = [len(self.pieces)]

    def __len__(self):
        return len(self.pieces) + 1

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[i] if i < len(self.pieces) else self.special for i in ids]


TOKENIZER = Bytes()
FACTS = Context(Vocabulary(len(TOKENIZER) + 5, TOKENIZER))  # type: ignore[arg-type]
SIZE = FACTS.vocabulary.size
SPECIAL = len(TOKENIZER.pieces)
ROW = torch.linspace(-3, 3, SIZE)
SETS = [("Han",), ("Cyrillic",), ("Han", "Hiragana"), ("Latin", "Hangul"), ("Han", "Cyrillic", "Greek", "Katakana")]


def in_scripts(character, scripts):
    return any(regex.match(rf"\p{{Script={script}}}", character) for script in scripts)


@cache
def assigned():
    text = "".join(chr(code_point) for code_point in range(0x80, 0x110000) if not 0xD800 <= code_point < 0xE000)
    return "".join(regex.findall(r"\P{Cn}+", text))


@cache
def continuations(scripts):
    """For every beginning of a character: whether it can become a banned one, and another one."""
    table = {}  # type: ignore[var-annotated]
    banned = set("".join(regex.findall("|".join(rf"\p{{Script={script}}}+" for script in scripts), assigned())))
    for character in assigned():
        data = character.encode()
        for length in range(1, len(data)):
            table.setdefault(data[:length], [False, False])[character not in banned] = True
    return table


def decoder_after(data):
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return decoder


@cache
def banned_behind(begun, scripts):
    banned = set()
    for token, piece in enumerate(TOKENIZER.pieces):
        decoder = decoder_after(begun)
        written = decoder.decode(piece)
        ends_with = decoder.getstate()[0]
        can_be_banned, can_be_other = continuations(scripts).get(ends_with, (False, False))
        if any(in_scripts(c, scripts) for c in written) or (can_be_banned and not can_be_other):
            banned.add(token)
    return banned


def banned_tokens(history, scripts):
    data = b"".join(TOKENIZER.pieces[token] for token in history)
    return banned_behind(decoder_after(data).getstate()[0], scripts)


words = st.one_of(
    st.lists(st.integers(0, SPECIAL - 1), max_size=4),
    st.sampled_from("中文の𠀀🦊Жaé䷀").map(lambda c: list(c.encode())),
    st.integers(256, SPECIAL - 1).map(lambda t: [t]),
)
histories = st.lists(words, max_size=4).map(lambda parts: [token for part in parts for token in part])


@given(prompt=histories, generated=histories, scripts=st.sampled_from(SETS))
@example(prompt=[], generated=list("中𠀀䷀🦊".encode()), scripts=("Han",))
@example(prompt=list("中".encode()[:2]), generated=list("文".encode()[:1]), scripts=("Han",))
@settings(max_examples=examples(60), deadline=None)
def test_bans_are_those_of_a_decoder(prompt, generated, scripts) -> None:
    processor = BanScripts(BanScripts.Args(scripts=list(scripts)), FACTS)
    expected = []
    for k in range(len(generated) + 1):
        row = ROW.clone()
        row[sorted(banned_tokens(prompt + generated[:k], scripts))] = -torch.inf
        row[len(TOKENIZER) :] = -torch.inf
        expected.append(row)
    assert_rows_equal(replayed([processor], FACTS, prompt, generated, ROW), expected)
    assert_rows_equal(step_by_step([processor], FACTS, prompt, generated, ROW), expected)


def allowed(processor, history):
    chain = ProcessorChain([processor], FACTS)
    chain.start([], history)
    return torch.isfinite(run_row(chain, ROW))


def test_a_banned_scripts_character_cannot_be_written_in_bytes() -> None:
    processor = BanScripts(BanScripts.Args(scripts=["Han"]), FACTS)
    assert allowed(processor, [])[0xE4]  # it may still become a hexagram, U+4DC0 to U+4DFF
    assert not allowed(processor, [])[0xE5]
    assert not allowed(processor, [0xE4])[0xB8]
    assert allowed(processor, [0xE4])[0xB7]
    assert allowed(processor, [0xE4, 0xB7])[0x80]
    assert not allowed(processor, [0xE4, 0xB6])[0x80]
    assert allowed(processor, [0xF0])[0x9F]
    assert not allowed(processor, [0xF0])[0xA0]


def test_a_token_is_banned_where_it_completes_a_banned_character() -> None:
    processor = BanScripts(BanScripts.Args(scripts=["Cyrillic"]), FACTS)
    half = TOKENIZER.pieces.index("Ж".encode()[1:] + "中".encode()[:1])
    assert allowed(processor, [])[half]
    assert not allowed(processor, [0xD0])[half]
    assert allowed(processor, [0xC3])[half]


def test_special_tokens_stay_and_padding_goes() -> None:
    processor = BanScripts(BanScripts.Args(scripts=["Latin"]), FACTS)
    assert allowed(processor, [])[SPECIAL]
    assert allowed(processor, [0xE4])[SPECIAL]
    assert not allowed(processor, [])[SPECIAL + 1 :].any()
    assert allowed(processor, [0xE4, SPECIAL])[0x80]  # the special token has cut the character off


def test_real_tokenizer_writes_no_banned_character() -> None:
    facts = context()
    processor = BanScripts(BanScripts.Args(scripts=["Han", "Hiragana", "Cyrillic"]), facts)
    chain = ProcessorChain([pickle.loads(pickle.dumps(processor))], facts)
    random = torch.Generator().manual_seed(7)
    pieces = vocabulary().token_bytes
    data = b""
    prefer = torch.tensor([3.0 if piece and piece[0] >= 0x80 else 0.0 for piece in pieces])
    chain.start(facts.vocabulary.encode("中文 and "))
    for _ in range(400):
        row = run_row(chain, torch.randn(len(pieces), generator=random) + prefer)
        token = int(row.argmax())
        data += pieces[token]
        chain.accept(token, chain.position)
    text = data.decode(errors="replace")
    assert not regex.search(r"\p{Han}|\p{Hiragana}|\p{Cyrillic}", text)
    assert len(text) > 100
    assert torch.isfinite(row)[END]
    assert torch.isneginf(row[-PADDING:]).all()


def test_masks_are_made_once_per_set_of_scripts() -> None:
    one = BanScripts(BanScripts.Args(scripts=["Han", "Latin"]), FACTS)
    other = BanScripts(BanScripts.Args(scripts=["latn", "HANI", "Han"]), FACTS)
    third = BanScripts(BanScripts.Args(scripts=["Latin", "Han"]), FACTS)
    one.start([])
    other.start([])
    third.start([])
    assert one.edit() is one.edit()
    assert one.edit() is third.edit()
    assert torch.equal(one.edit().bitmask, other.edit().bitmask)  # type: ignore[union-attr]


def test_pickled_without_the_vocabulary() -> None:
    processor = BanScripts(BanScripts.Args(scripts=["Han"]), context())
    data = pickle.dumps(processor)
    assert b"PreTrainedTokenizer" not in data
    assert len(data) < 100_000


@pytest.mark.parametrize("name", ["Klingon", "Common", "zyyy", "Inherited", "Unknown", "Lu"])
def test_names_that_are_no_script_of_their_own(name) -> None:
    with pytest.raises(ArgumentError, match=rf"scripts: .*{name}"):
        BanScripts(BanScripts.Args(scripts=[name]), FACTS)


def test_scripts_that_leave_nothing() -> None:
    class Only(Bytes):
        def __init__(self) -> None:
            self.pieces = ["中".encode(), "文".encode()]
            self.all_special_ids = [2]

    with pytest.raises(ArgumentError, match="leave no token"):
        BanScripts(BanScripts.Args(scripts=["Han"]), Context(Vocabulary(4, Only())))  # type: ignore[arg-type]


def test_scripts_need_a_tokenizer() -> None:
    with pytest.raises(ArgumentError, match="need a tokenizer"):
        BanScripts(BanScripts.Args(scripts=["Han"]), Context(Vocabulary(4)))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"scripts": []},
        {"scripts": ["Han"] * 65},
        {"scripts": ["H" * 33]},
        {"scripts": ["Han}|."]},
        {"scripts": [""]},
        {"scripts": "Han"},
        {"scripts": ["Han"], "scope": "answer"},
    ],
)
def test_refused_arguments(arguments) -> None:
    with pytest.raises(ValidationError):
        BanScripts.Args(**arguments)
