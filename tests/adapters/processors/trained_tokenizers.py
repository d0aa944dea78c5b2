"""Small tokenizers of the kinds that models have, trained in memory, and a model that says what it
is told in bytes.

Characters beyond ASCII have no piece of their own, so all of them are written in several tokens.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vocab_for_tests import run_row

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.vocabulary import Vocabulary, byte_index

CORPUS = [
    "The answer is Yes, and the secret is that Yes is the answer.",
    "However, the quick brown fox jumps over the lazy dog; secretly the dog sleeps.",
    "Wait: think about the question, then answer the question. No secrets here!",
    "def f(x):\n    return x + 1  # the answer\n\nYes or No? 0 1 2 3 4 5 6 7 8 9 10 42",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "[TURN]"]
TAGS = ["<think>", "</think>"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]

_LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def _trained(model: Any, trainer: Any) -> dict[str, Any]:
    """The trained model as JSON data; words are pieces that begin with ``▁``, as SentencePiece
    trains them.
    """
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n+"), "removed"), pre_tokenizers.Metaspace()]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return found


@lru_cache
def _bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    found = _trained(models.BPE(), trainers.BpeTrainer(vocab_size=160, show_progress=False))
    pieces = [*SPECIAL, *BYTE_PIECES, *sorted(found["vocab"], key=found["vocab"].get)]
    merges = [tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in found["merges"]]
    return {piece: i for i, piece in enumerate(pieces)}, merges


@lru_cache
def _unigram() -> list[tuple[str, float]]:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    found = _trained(models.Unigram(), trainer)
    scored = [(piece, score) for piece, score in found["vocab"] if piece != "<unk>"]
    return [*((piece, 0.0) for piece in SPECIAL), *((piece, -30.0) for piece in BYTE_PIECES), *scored]


def _sentencepiece_bpe() -> Tokenizer:
    vocab, merges = _bpe()
    return Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def llama_legacy() -> Tokenizer:
    """Llama 2: a normaliser puts ``▁`` before the text and in the place of spaces; there is no
    pre-tokenizer.
    """
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _LLAMA
    return tokenizer


def _metaspace(tokenizer: Tokenizer, scheme: str, *, split: bool = False) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    tokenizer.decoder = _LLAMA
    return tokenizer


def byte_level(*, nfc: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:  # Qwen
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Emoji merge in part: b"\xf0\x9f" is a token, and so is b"!\xf0\x9f".
    tokenizer.train_from_iterator([*CORPUS, *["!😀!😁!😂!🙀!🚀!🎉"] * 4], trainer)
    return tokenizer


_KINDS = {
    "llama-legacy": llama_legacy,
    "bpe-first": lambda: _metaspace(_sentencepiece_bpe(), "first"),
    "bpe-always": lambda: _metaspace(_sentencepiece_bpe(), "always"),
    "bpe-never": lambda: _metaspace(_sentencepiece_bpe(), "never"),
    "unigram-first": lambda: _metaspace(
        Tokenizer(models.Unigram(_unigram(), unk_id=0, byte_fallback=True)), "first", split=True
    ),
    "unigram-always": lambda: _metaspace(
        Tokenizer(models.Unigram(_unigram(), unk_id=0, byte_fallback=True)), "always", split=True
    ),
    "byte-level": byte_level,
    "byte-level-nfc": lambda: byte_level(nfc=True),
}
KINDS = tuple(_KINDS)
PREFIXED = ("llama-legacy", "bpe-first", "bpe-always", "unigram-first", "unigram-always")
"""Those that put a space before a text."""


def made(kind: str) -> Tokenizer:
    """A tokenizer without added tokens."""
    return _KINDS[kind]()


@lru_cache
def vocabulary_of(kind: str) -> Vocabulary:
    """Its row is wider than its ids."""
    backend = made(kind)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    return Vocabulary(len(tokenizer) + 7, tokenizer, [tokenizer.eos_token_id])  # type: ignore[arg-type]


def context_of(kind: str, **changes: Any) -> Context:
    vocabulary = vocabulary_of(kind)
    facts: dict[str, Any] = {
        "vocabulary": vocabulary,
        "end_token_ids": vocabulary.eos_token_ids,
        "think_start": tuple(vocabulary.encode("<think>")),
        "think_end": tuple(vocabulary.encode("</think>")),
    }
    return Context(**(facts | changes))


def prompt_of(kind: str) -> list[int]:
    """A prompt as a chat template would end it."""
    tokenizer: Any = vocabulary_of(kind).tokenizer
    return [*tokenizer.encode("the question", add_special_tokens=False), tokenizer.convert_tokens_to_ids("[TURN]")]


def said(kind: str, prompt: list[int], tokens: list[int]) -> str:
    """The text that tokens behind a prompt add to it."""
    vocabulary = vocabulary_of(kind)
    before = vocabulary.decode(prompt)
    text = vocabulary.decode([*prompt, *tokens])
    assert text.startswith(before)
    return text[len(before) :]


def speak(kind: str, chain: ProcessorChain, text: str, *, most: int = 200) -> list[int]:
    """What a greedy model writes that wants to say ``text``, in the longest tokens it is left, and
    then to end.

    Where it is kept from going on with its text it writes an x.
    """
    index = byte_index(vocabulary_of(kind))
    (end,) = vocabulary_of(kind).eos_token_ids
    rest = text.encode()
    while chain.position - chain.prompt_length < most:
        row = torch.zeros(chain.context.vocabulary.size)
        row[index.ids[b"x"][0]] = 5.0
        if not rest:
            row[end] = 10.0
        for length in range(1, min(index.longest, len(rest)) + 1):
            row[index.ids.get(rest[:length], [])] = 10.0 + length
        is_forced = chain.plan().force is not None
        token_id = int(run_row(chain, row).argmax())
        chain.accept(token_id, chain.position)
        if token_id == end:
            break
        piece = index[token_id]
        rest = rest[len(piece) :] if rest.startswith(piece) and not is_forced else rest
    return chain.tokens[chain.prompt_length :]
