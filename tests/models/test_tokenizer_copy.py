"""A copied tokenizer gives what transformers' own gives, or none is made."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from adapters.processors.grammar import tokenizer_tables
from adapters.vocabulary import CopiedTokenizer, Vocabulary, thinking_tags
from worker.models.beside import DIRECTORY, copies_of, file_digests
from worker.models.tokenizer_copy import load_vocabulary
from worker.tiny_model import write_tiny_model

CORPUS = ["the quick brown fox jumps over the lazy dog", "Привет, мир! 中文 と 日本語", "fox\nquick: brown"] * 4


def byte_level(**options: Any) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options)


def wordpiece(**options: Any) -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **options)


def padded() -> Any:
    tokenizer = byte_level(pad_token="</s>", model_max_length=8)
    tokenizer(["the fox", "the"], padding=True, truncation=True)
    return tokenizer


MADE = {
    "byte level": byte_level,
    "SentencePiece": sentencepiece,
    "WordPiece": wordpiece,
    "padded and cut off": padded,
    "Llama's class": lambda: LlamaTokenizerFast(
        vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}, merges=[("▁", "a")]
    ),
}


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    MADE[request.param]().save_pretrained(path)
    return Path(path)


def pair(path: Path) -> tuple[Vocabulary, Vocabulary]:
    """With transformers' tokenizer, and with a copy."""
    own = Vocabulary.from_pretrained(str(path), 400, (1,))
    load_vocabulary(path, 400, (1,))
    copied = load_vocabulary(path, 400, (1,))
    assert isinstance(copied.tokenizer, CopiedTokenizer)
    return own, copied


def test_all_that_is_known_of_the_vocabulary_is_the_same(checkpoint: Path) -> None:
    own, copied = pair(checkpoint)
    for name in (
        "num_tokens",
        "gap_ids",
        "token_bytes",
        "hidden_token_ids",
        "special_token_ids",
        "added_token_ids",
        "eos_token_ids",
    ):
        assert getattr(copied, name) == getattr(own, name), name
    assert copied.address == own.address
    assert thinking_tags(copied) == thinking_tags(own)
    for tokenizer in (own.tokenizer, copied.tokenizer):
        assert tokenizer is not None
    assert len(copied.tokenizer) == len(own.tokenizer)  # type: ignore[arg-type]
    assert tokenizer_tables(own) == tokenizer_tables(copied)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_texts_and_ids_are_the_same(data: st.DataObject) -> None:
    own = MADE[data.draw(st.sampled_from(["byte level", "SentencePiece", "WordPiece"]))]()
    content = CopiedTokenizer.to_json(own)
    assert content is not None
    copied = CopiedTokenizer(content)
    parts = st.sampled_from(["<tool>", "<s>", "</s>", " the", "fox", "\n", "[UNK]", "<0x0A>", "▁"])
    text = "".join(data.draw(st.lists(st.one_of(st.text(max_size=8), parts), max_size=8)))
    for adds in (True, False):
        assert copied.encode(text, add_special_tokens=adds) == own.encode(text, add_special_tokens=adds)
    ids = data.draw(st.lists(st.integers(0, len(own) - 1), max_size=12))
    assert copied.convert_ids_to_tokens(ids) == own.convert_ids_to_tokens(ids)
    assert copied.decode(ids) == own.decode(ids)
    for skips in (True, False):
        assert copied.decode(ids, skip_special_tokens=skips) == own.decode(ids, skip_special_tokens=skips)


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(split_special_tokens=True),
        wordpiece(clean_up_tokenization_spaces=True),
        sentencepiece(clean_up_tokenization_spaces=True),
        object(),
    ],
    ids=["special tokens split", "WordPiece cleaned up", "SentencePiece cleaned up", "no backend"],
)
def test_there_is_none_where_transformers_adds_code_of_its_own(tokenizer: Any) -> None:
    assert CopiedTokenizer.to_json(tokenizer) is None


def test_there_is_none_of_a_class_that_decodes_in_its_own_way() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return super()._decode(*arguments, **options).upper()

    backend = byte_level().backend_tokenizer
    assert CopiedTokenizer.to_json(Shouting(tokenizer_object=backend, eos_token="</s>")) is None
    assert CopiedTokenizer.to_json(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")) is not None


def test_a_tokenizer_that_cannot_write_every_text_is_not_copied(tmp_path: Path) -> None:
    """Its library raises for what the tokenizer does not know."""
    scored = [("</s>", 0.0), *((letter, -1.0) for letter in "abc ▁")]
    tokenizer = Tokenizer(models.Unigram(scored))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    for _ in range(2):
        vocabulary = load_vocabulary(tmp_path, 400, (0,))
        assert not isinstance(vocabulary.tokenizer, CopiedTokenizer)
        assert vocabulary.token_bytes[1] == b" a"  # without a decoder there are spaces between tokens
    assert not (tmp_path / DIRECTORY).exists()


def test_it_needs_no_transformers(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny", arch="llama")
    script = f"""
import sys
from pathlib import Path
from worker.models.tokenizer_copy import load_vocabulary
vocabulary = load_vocabulary(Path({str(path)!r}), 400, (2,))
print(vocabulary.token_bytes, "transformers" in sys.modules)
"""
    own = load_vocabulary(path, 400, (2,))
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == f"{own.token_bytes} False\n"


def test_of_another_tokenizer_it_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    byte_level().save_pretrained(tmp_path)
    pair(tmp_path)
    sentencepiece().save_pretrained(tmp_path)
    own, copied = pair(tmp_path)
    assert copied.token_bytes == own.token_bytes
    assert "is made again: the checkpoint has another tokenizer.json" in caplog.text


def test_it_lies_where_it_is_told(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path / "model")
    path = copies_of(tmp_path / "model", str(tmp_path / "all"))
    assert path is not None
    first, second = (load_vocabulary(tmp_path / "model", 400, (1,), str(tmp_path / "all")) for _ in range(2))
    assert isinstance(second.tokenizer, CopiedTokenizer)
    assert first.token_bytes == second.token_bytes
    assert [each.name for each in path.iterdir() if each.suffix == ".json"] == ["tokenizer.json"]
    load_vocabulary(tmp_path / "model", 400, (1,), "off")
    assert not (tmp_path / "model" / DIRECTORY).exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b"\xff", b'{"content": "{}", "sha256": "0"}'])
def test_a_damaged_one_is_made_again(content: bytes, tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    own, _ = pair(tmp_path)
    path = tmp_path / DIRECTORY / "tokenizer.json"
    whole = path.read_bytes()
    for damaged in (content, whole[:-100], whole.replace(b"fox", b"fix", 1)):
        path.write_bytes(damaged)
        assert load_vocabulary(tmp_path, 400, (1,)).token_bytes == own.token_bytes
        assert path.read_bytes() == whole
    assert sorted(each.name for each in path.parent.iterdir()) == ["tokenizer.json", "tokenizer.lock"]


def in_place_of(path: Path, kind: str) -> None:
    """Put what is no regular file where one is."""
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "directory": os.mkdir, "loop": lambda here: os.symlink(here, here)}[kind](path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "directory", "loop"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.lock", "digests.json", "digests.lock"])
def test_a_start_waits_for_nothing_beside_a_checkpoint(kind: str, name: str, tmp_path: Path) -> None:
    """A pipe would block its reader, and one that writes to it, for ever."""
    byte_level().save_pretrained(tmp_path)
    own, _ = pair(tmp_path)
    in_place_of(tmp_path / DIRECTORY / name, kind)
    (tmp_path / "added.json").touch()  # so that it is made again
    for _ in range(2):
        assert load_vocabulary(tmp_path, 400, (1,)).token_bytes == own.token_bytes
    assert file_digests(tmp_path, [tmp_path / "tokenizer.json"], tmp_path / DIRECTORY)


def test_where_none_can_be_written_there_is_transformers_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    byte_level().save_pretrained(tmp_path)
    (tmp_path / DIRECTORY).touch()
    for _ in range(2):
        vocabulary = load_vocabulary(tmp_path, 400, (1,))
        assert type(vocabulary.tokenizer) is type(AutoTokenizer.from_pretrained(tmp_path))  # type: ignore[comparison-overlap]
    assert "the tokenizer is not copied to" in caplog.text


def test_without_a_tokenizer_the_error_is_transformers_own(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        load_vocabulary(tmp_path, 400, (1,))
    assert not (tmp_path / DIRECTORY).exists()


def test_a_tag_is_a_text_of_one_token(checkpoint: Path) -> None:
    """As encoding says, which needs the whole tokenizer; a text that no token has does not."""
    for vocabulary in pair(checkpoint):
        texts = {*map(bytes.decode, (token for token in vocabulary.token_bytes if token.isascii())), "<think>", "fox"}
        known: Any = vocabulary.tokenizer
        for text in {*texts, *(f"{text}?" for text in texts), *known.get_vocab()}:
            try:
                ids = tuple(vocabulary.encode(text))
            except ValueError:
                ids = ()
            assert vocabulary.tag(text) == (ids if len(ids) == 1 else ()), text


def test_a_copy_is_whole_before_its_tokenizer_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, copied = pair(checkpoint)
    monkeypatch.setattr(CopiedTokenizer, "backend_tokenizer", None)
    assert copied.num_tokens == own.num_tokens
    assert len(copied.tokenizer) == len(own.tokenizer)  # type: ignore[arg-type]
    assert tokenizer_tables(copied) == tokenizer_tables(own)
    assert copied.tag("no such token") == ()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_copy_of_a_copy_is_the_same(checkpoint: Path, is_read: bool, again: Callable[[object], object]) -> None:
    _, vocabulary = pair(checkpoint)
    copied = vocabulary.tokenizer
    assert isinstance(copied, CopiedTokenizer)
    if is_read:
        assert copied.backend_tokenizer
    other = again(copied)
    assert isinstance(other, CopiedTokenizer)
    assert other.encode("the fox") == copied.encode("the fox")
    assert other.get_vocab() == copied.get_vocab()
    assert other.kept_token_bytes == copied.kept_token_bytes
    moved = pickle.loads(pickle.dumps(Vocabulary(400, copied, (1,))))  # without a path it has its tokenizer
    assert moved.token_bytes == vocabulary.token_bytes
