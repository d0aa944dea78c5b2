"""Tokenizers of GGUF files split and join text as those of the models they come from."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from worker.models.gguf_file import GgufError
from worker.models.splits import splits
from worker.models.tokenizer import SPLITS, GgufTokenizer

TEXTS = [
    "Hello world! It's 1234567 o'clock, isn't it?",
    "  two spaces,\ttab\n\n\nthree lines \r\n  and  1 2 33",
    "Grüße, naïve café, 日本語, русский, 😀 and e\u0301",
    "def f(x):\n    return x+1  # 42\n<|end|>after<think>inside</think>",
    "",
    " ",
]
SPECIAL = ["<|start|>", "<|end|>"]


def byte_level(steps: list[Any]) -> Tokenizer:
    """Trained on texts like those that it will see, so that its merges matter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS * 3 + ["12345 123 12 1234 33 4242"] * 5, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, **values: Any) -> dict[str, Any]:
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = dict.fromkeys(SPECIAL, 3) | {"<think>": 4, "</think>": 4}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    found = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [kinds.get(token, 1) for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (found | values).items() if value is not None}


def loaded(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(GgufTokenizer(metadata).files(100)["tokenizer.json"])


STEPS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "olmo": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""As in the ``tokenizer.json`` of GPT-2, OLMoE, SmolLM2 and Qwen2."""


@pytest.mark.parametrize("name", STEPS)
def test_byte_level_vocabularies(name: str) -> None:
    source = byte_level(STEPS[name])  # type: ignore[arg-type]
    if name in ("olmo", "qwen2"):
        source.normalizer = normalizers.NFC()
    found = loaded(metadata_of(source, pre=name))
    for text in TEXTS:
        assert found.encode(text).ids == source.encode(text).ids, text
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == source.decode(
            source.encode(text).ids, skip_special_tokens=False
        )


def test_splits_differ() -> None:
    """Each name has an effect of its own on digits."""
    metadata = metadata_of(byte_level(STEPS["gpt-2"]), add_bos_token=False)  # type: ignore[arg-type]
    counts = {name: len(loaded(metadata | {"tokenizer.ggml.pre": name}).encode("1234").ids) for name in SPLITS}
    assert {counts[name] for name in ("smollm", "refact", "qwen2", "tekken")} == {4}
    assert counts["gpt-2"] < counts["llama-bpe"] < 4
    assert {counts[name] for name in ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "gpt-4o")} == {counts["llama-bpe"]}


@pytest.mark.parametrize("name", sorted(set(SPLITS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_regular_expressions_are_those_of_transformers(name: str) -> None:
    assert SPLITS[name].regexes == (GGUF_PRE_TOKENIZER_SPLITS[name],)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("deepseek-llm", "Hi| there|!| Don|'|t| |1|2|3|4|\n|\n|中文|abc|.,| Żółć| | x|  "),
        ("deepseek-v3", "Hi| there|!| Don|'t| |123|4|\n\n|中文|abc|.,| Żółć| | x|  "),
    ],
)
def test_texts_that_deepseek_splits(name: str, pieces: str) -> None:
    text = "Hi there! Don't 1234\n\n中文abc., Żółć  x  "
    steps = loaded(metadata_of(byte_level(STEPS["gpt-2"]), pre=name)).pre_tokenizer  # type: ignore[arg-type]
    assert [text[first:stop] for _, (first, stop) in steps.pre_tokenize_str(text)] == pieces.split("|")


def test_letters_of_deepseek_are_cased_ones() -> None:
    """Oniguruma's, of the class: all of Latin and Greek, and nothing that is no letter."""
    letters = pre_tokenizers.Split(Regex(SPLITS["deepseek-llm"].regexes[1].removeprefix(r"\s?")), "removed")
    cased = [chr(code) for code in range(0x30000) if unicodedata.category(chr(code)) in ("Lu", "Ll", "Lt")]
    others = "".join(chr(code) for code in range(0x30000) if unicodedata.category(chr(code))[0] in "LNPZ")
    kept = "".join(piece for piece, _ in letters.pre_tokenize_str(others))
    found = set(others) - set(kept)
    assert found < set(cased)
    assert {each for each in cased if ord(each) < 0x531} <= found
    assert len(found) > 2500


def test_llama_3_begins_with_bos_and_keeps_whole_pieces() -> None:
    source = byte_level(STEPS["gpt-2"])  # type: ignore[arg-type]
    plain = loaded(metadata_of(source, pre="llama-bpe", add_bos_token=False)).encode("Hello").ids
    assert loaded(metadata_of(source, pre="llama-bpe")).encode("Hello").ids == [0, *plain]
    tokens = [*metadata_of(source)["tokenizer.ggml.tokens"], "Hellozzz"]
    kinds = [*metadata_of(source)["tokenizer.ggml.token_type"], 1]
    whole = {"tokens": tokens, "token_type": kinds, "add_bos_token": False}
    assert loaded(metadata_of(source, pre="llama-bpe", **whole)).encode("Hellozzz").ids == [len(tokens) - 1]
    assert len(loaded(metadata_of(source, pre="gpt-2", **whole)).encode("Hellozzz").ids) > 1


def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    """Llama 2's kind, and its metadata: a piece's score is minus its rank."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=220, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()] * 4 + ["hello hollow help"] * 4, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"]]
    joined = ["".join(merge) for merge in merges]
    letters = sorted(set(model["vocab"]) - set(joined))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *joined, *letters]
    tokens = list(dict.fromkeys(tokens))
    vocab = {token: number for number, token in enumerate(tokens)}
    source = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    source.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    source.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(number) for number in range(len(tokens) - 259)]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return source, {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_sentencepiece_vocabularies() -> None:
    source, metadata = sentencepiece()
    found = loaded(metadata)
    bare = loaded(metadata | {"tokenizer.ggml.add_bos_token": False})
    for text in ["hello world", "help  hollow\n1234", "Grüße 😀", "hollow<unclear>"]:
        assert bare.encode(text).ids == source.encode(text).ids, text
        assert found.encode(text).ids == [1, *source.encode(text).ids]
        assert bare.decode(bare.encode(text).ids) == source.decode(source.encode(text).ids) == text


def test_answers_end_at_every_end_token_of_the_file() -> None:
    source = byte_level(STEPS["gpt-2"])  # type: ignore[arg-type]
    tokens = [*metadata_of(source)["tokenizer.ggml.tokens"], "<|eot_id|>", "<|im_end|>"]
    kinds = [*metadata_of(source)["tokenizer.ggml.token_type"], 3, 1]  # the last one is only text
    found = GgufTokenizer(metadata_of(source, pre="gpt-2", tokens=tokens, token_type=kinds, padding_token_id=1))
    assert found.special_ids == {"eos_token_id": [1, len(tokens) - 2], "bos_token_id": 0, "pad_token_id": 1}


@settings(max_examples=examples(300), deadline=None)
@given(pieces=st.sets(st.text("ab▁", max_size=9), max_size=40))
def test_splits_of_a_vocabulary(pieces: set[str]) -> None:
    found = list(splits(pieces))
    tried = {(piece, piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))}
    assert sorted(found) == sorted(each for each in tried if {*each} <= pieces)


def test_a_long_token_takes_linear_time() -> None:
    """Each of its 300,000 prefixes and suffixes, compared, is 45 thousand million characters."""
    long = "ab" * 150_000
    assert list(splits([long, "a", "b", "ab", long[:-1]])) == [(long, long[:-1], "b"), ("ab", "a", "b")]
    with pytest.raises(GgufError, match="absurdly many ways"):
        list(splits(["a" * number for number in range(1, 2000)]))


def test_tokens_that_end_an_answer_whatever_its_eos() -> None:
    metadata = metadata_of(byte_level(STEPS["gpt-2"]), pre="gpt-2")  # type: ignore[arg-type]
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    first = len(tokens)
    tokens += ["<|return|>", "<|call|>", "<end_of_turn>"]
    kinds += [3, 3, 3]
    metadata["tokenizer.ggml.eos_token_id"] = first
    assert GgufTokenizer(metadata).special_ids["eos_token_id"] == [first, first + 1]
    tokens[first + 1] = "<|other|>"  # not GPT-OSS's, in whose answers <|end|> is the end of a part
    assert GgufTokenizer(metadata).special_ids["eos_token_id"] == [SPECIAL.index("<|end|>"), first, first + 2]
