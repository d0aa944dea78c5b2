"""Vocabularies whose ids have gaps, and what a checkpoint with one still does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import ArgumentError, Context
from adapters.processors.arguments import check_tokens
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.grammar import Choice
from adapters.processors.masks import BannedTokens
from adapters.processors.scripts import BanScripts
from adapters.testing.kit_model import kit_vocabulary
from adapters.vllm.model import ModelFacts, ServedModel
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.model.checkpoint_files import undecodable_ids
from worker.engines.vllm.chain_receiver import ChainReceiver
from worker.tiny_model import write_tiny_model

FIRST_MOVED, GAP = 370, 20


@pytest.fixture(scope="module")
def gapped(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The house's tokenizer with a gap below its last ten pieces, into which its added tokens
    then fall.
    """
    house = kit_vocabulary()
    directory = tmp_path_factory.mktemp("gapped")
    assert house.path is not None
    for source in Path(house.path).iterdir():
        (directory / source.name).write_bytes(source.read_bytes())
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {piece: i + GAP * (i >= FIRST_MOVED) for piece, i in vocab.items()}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return Vocabulary.from_pretrained(str(directory), house.size + GAP)


@pytest.fixture(scope="module")
def last(gapped: Vocabulary) -> str:
    """The text of the highest id."""
    return gapped.token_bytes[gapped.num_tokens - 1].decode()


def allowed(processor: object, facts: Context, generated: list[int]) -> set[int]:
    chain = ProcessorChain([processor], facts)  # type: ignore[list-item]
    chain.start([1], generated)
    row = torch.zeros(1, facts.vocabulary.size)
    planned, failures = plan_rows([(0, chain)])
    assert not (failures | apply_edits(row, planned))
    return set(torch.isfinite(row[0]).nonzero().flatten().tolist())


def test_the_highest_id_counts_not_the_number_of_tokens(gapped: Vocabulary, last: str) -> None:
    house = kit_vocabulary()
    assert len(gapped.tokenizer) == len(house.tokenizer) == 382  # type: ignore[arg-type]
    assert gapped.num_tokens == 400
    assert gapped.encode(last) == [399]
    assert gapped.token_bytes[399] == house.token_bytes[379] != b""
    assert gapped.token_bytes[gapped.encode("<think>")[0]] == b"<think>"
    assert gapped.gap_ids == {*range(370, 380), *range(382, 390)}
    assert not house.gap_ids
    assert not Vocabulary(10).gap_ids


def test_of_ids_that_share_a_piece_all_have_a_token(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0), ("▁a", -2.0), ("b", -3.0), ("b", -4.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    vocabulary = Vocabulary(8, tokenizer)
    assert not vocabulary.gap_ids
    assert undecodable_ids(tmp_path, 8) == (6, 7)
    assert vocabulary.token_bytes == (b"", b" a", b"b", b" a", b"b", b"b", b"", b"")


ADDED = {"content": "<|added|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    ("files", "num_added"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": {"1000": ADDED, "1001": ADDED | {"content": "<|b|>"}}}}, 2),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": "<|added|>",
                    "pad_token": ADDED | {"__type": "AddedToken"},
                    "bos_token": "<|im_end|>",
                }
            },
            1,
        ),
        ({"tokenizer_config.json": {"extra_special_tokens": ["<|added|>", "<|im_end|>"]}}, 1),
        ({"tokenizer_config.json": {"additional_special_tokens": ["<|added|>", "<|b|>"]}}, 2),
        ({"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|added|>"}}}, 1),
        ({"tokenizer_config.json": {}, "added_tokens.json": {"<|added|>": 1000, "<|im_end|>": 4}}, 1),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": ADDED}}, 1),
        ({"tokenizer_config.json": {"added_tokens_decoder": {}}, "added_tokens.json": {"<|added|>": 1000}}, 0),
    ],
    ids=lambda each: "" if isinstance(each, int) else "-".join([*each, *each["tokenizer_config.json"]]),
)
def test_tokens_of_other_files_can_be_sampled(tmp_path: Path, files: dict[str, Any], num_added: int) -> None:
    """They are those that transformers' tokenizer has, which reads prompts and answers."""
    write_tiny_model(tmp_path)
    (tmp_path / "tiny_model.json").unlink()
    for name, content in files.items():
        also = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config.json" else {}
        (tmp_path / name).write_text(json.dumps(content | also))
    vocabulary = Vocabulary.from_pretrained(str(tmp_path), 1024)
    assert undecodable_ids(tmp_path, 1024) == vocabulary.never_ids == tuple(range(1000 + num_added, 1024))
    ends = ModelFacts(str(tmp_path), 1024, frozenset({1010}), "model")
    for never in (ChainReceiver(ends).never_ids, ServedModel.load(ends).never_ids):
        assert [*never] == [each for each in vocabulary.never_ids if each != 1010]


def test_a_digest_is_that_of_the_tokens(gapped: Vocabulary) -> None:
    """However wide a row of logits is, and whatever tokens have been added."""
    house = kit_vocabulary()
    wider = Vocabulary(house.size + 64, house.tokenizer, (3, 5))
    assert len({house.digest, wider.digest}) == 1
    assert len(house.digest) == 32
    assert gapped.digest != house.digest
    assert Vocabulary(house.size).digest == Vocabulary(8, house.tokenizer).digest == ""


def test_a_tag_is_one_token_or_none(gapped: Vocabulary) -> None:
    assert gapped.tag("<think>") == tuple(gapped.encode("<think>"))
    assert gapped.tag("<think>\n") == ()
    assert gapped.tag("<\ud800>") == ()
    assert Vocabulary(10).tag("<think>") == ()
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    assert Vocabulary(2, PreTrainedTokenizerFast(tokenizer_object=letters)).tag("<think>") == ()  # type: ignore[arg-type]  # it cannot write it


def test_ids_in_a_gap_are_padding(gapped: Vocabulary) -> None:
    facts = Context(gapped)
    assert gapped.token_bytes[375] == b""
    check_tokens(facts, "token_ids", [399])
    with pytest.raises(ArgumentError, match="375, which is padding"):
        check_tokens(facts, "token_ids", [375])
    every_token = [i for i in range(gapped.num_tokens) if i not in gapped.gap_ids]
    with pytest.raises(ArgumentError, match="no token of the vocabulary"):
        BannedTokens(BannedTokens.Args(token_ids=every_token), facts)


def test_tokens_behind_a_gap_can_be_forced_and_stay_allowed(gapped: Vocabulary, last: str) -> None:
    facts = Context(gapped, gapped.eos_token_ids)
    chain = ProcessorChain([ForcedPrefix(ForcedPrefix.Args(text=f"{last}\n"), facts)], facts)
    chain.start([1])
    assert chain.plan().force == 399
    assert 399 in allowed(BanScripts(BanScripts.Args(scripts=["Han"]), facts), facts, [])


def test_a_grammar_knows_every_token(gapped: Vocabulary, last: str) -> None:
    facts = Context(gapped, gapped.eos_token_ids)
    processor = Choice(Choice.Args(choices=[f"The fox{last}", "no"]), facts)
    assert {gapped.token_bytes[i][:1] for i in allowed(processor, facts, [])} == {b"T", b"n"}
    assert 399 in allowed(processor, facts, gapped.encode("The fox"))
    assert allowed(processor, facts, gapped.encode(f"The fox{last}")) == set(gapped.eos_token_ids)


def test_an_end_token_that_is_not_marked_is_shown(gapped: Vocabulary) -> None:
    """It ends answers, and is text behind ``ignore_eos``."""
    (word,) = gapped.encode("fox")[-1:]
    vocabulary = Vocabulary(gapped.size, gapped.tokenizer, [word])
    assert word in vocabulary.special_token_ids - vocabulary.hidden_token_ids
    assert vocabulary.hidden_token_ids == gapped.special_token_ids - gapped.eos_token_ids | gapped.hidden_token_ids


def test_the_bytes_of_tokens_are_nobodys_to_change() -> None:
    """Every request's processors share them, and its stop strings."""
    pieces: Any = kit_vocabulary().token_bytes
    with pytest.raises(TypeError):
        pieces[0] = b"<end>"
    assert not hasattr(pieces, "sort")
