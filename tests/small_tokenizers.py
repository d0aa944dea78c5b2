"""Small tokenizers for tests, made in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from adapters.vocabulary import Vocabulary, num_ids


def sentencepiece(**options: Any) -> Any:
    """Pieces with spaces, and bytes for what has no piece; `options` are of the class."""
    pieces = ["▁", "▁the", "▁fox", "the", "qu", "ick", "и", "中", *"abcdefghijklmnopqrstuvwxyz"]
    scored = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    scored += [(piece, -float(len(pieces) - len(piece))) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **options)


CORPUS = [
    '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n<tool_call>\n</tool_call>\n',
    '{"name":"one","arguments":{"a":1,"b":[true,null,"x"]}} the quick brown fox, the answer: yes or no?',
    "def f(x):\n    return x + 1  # a < b > c [INST] [/INST] Привет, мир! 中文 é 😀😁 \t 0123456789",
] * 8
"""Text that the tokenizers of `MODELS` are trained on."""


def _byte_level(*, nfc: bool = False, special: tuple[str, ...] = (), size: int = 420) -> Tokenizer:
    """A tokenizer like that of Qwen, Llama 3, DeepSeek or GPT-OSS: bytes, and pieces of them."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_fallback(special: tuple[str, ...], plain: tuple[str, ...], *, first_space: bool) -> Tokenizer:
    """A tokenizer like that of Llama 2, Mistral or Gemma: pieces of characters, and bytes."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    found = [piece for piece in sorted(model["vocab"], key=model["vocab"].get) if piece not in plain]
    pieces = [*special, *plain, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", *(p for p in found if p != "\n")]
    merges = [tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if first_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
    strip = [decoders.Strip(" ", 1, 0)] if first_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _with_a_gap(tokenizer: Tokenizer, first: int, gap: int) -> Tokenizer:
    """The ids from ``first`` on moved, so that ``gap`` ids below them have no piece."""
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = {p: i + gap * (i >= first) for p, i in content["model"]["vocab"].items()}
    return Tokenizer.from_str(json.dumps(content))


class Model(NamedTuple):
    """A kind of model's tokenizer.

    Attributes:
        make: Makes the tokenizer without its added tokens.
        special: Texts of the special tokens, the end tokens first.
        plain: Texts of added tokens that are not special.
        num_ends: Number of those of `special` that end an answer.
        padding: Ids of the row behind the highest one.
    """

    make: Callable[[], Tokenizer]
    special: tuple[str, ...]
    plain: tuple[str, ...]
    num_ends: int = 1
    padding: int = 7


_MISTRAL = ("</s>", "<s>", "<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]")
_GEMMA = ("<end_of_turn>", "<eos>", "<bos>", "<pad>", "<unk>", "<start_of_turn>")
_GEMMA_PLAIN = ("<unused0>", "[multimodal]", "<table>", "</table>", "\n\n", "▁▁")

MODELS = {
    "qwen": Model(
        lambda: _byte_level(nfc=True),
        ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|python_tag|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>"),
        num_ends=2,
    ),
    "llama": Model(
        lambda: _byte_level(size=400),
        ("<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|python_tag|>", "<|reserved_special_token_0|>"),
        (),
        num_ends=2,
        padding=0,
    ),
    "gemma": Model(lambda: _byte_fallback(_GEMMA, _GEMMA_PLAIN[:2], first_space=False), _GEMMA, _GEMMA_PLAIN),
    "mistral": Model(
        lambda: _byte_fallback(_MISTRAL, ("[THINK]",), first_space=True), _MISTRAL, ("[THINK]", "[/THINK]"), padding=0
    ),
    "deepseek": Model(
        lambda: _byte_level(special=("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>")),
        ("<\uff5cend▁of▁sentence\uff5c>", "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5ctool▁sep\uff5c>"),
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5ctool▁calls▁begin\uff5c>", "<think>", "</think>"),
        padding=64,
    ),
    "gpt-oss": Model(
        lambda: _with_a_gap(_byte_level(size=410), 380, 60),
        ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "[END]"),
        ("<tag>", "[tag]"),
        num_ends=2,
    ),
}
"""Kinds of tokenizers that models have: byte-level and with byte fallback, with added tokens that
are special and that are not, written ``<…>``, ``[…]`` and otherwise, with gaps and padding.
"""


@lru_cache
def vocabulary_like(name: str) -> Vocabulary:
    """The vocabulary of one of `MODELS`, trained once."""
    model = MODELS[name]
    backend = model.make()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in model.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in model.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=model.special[0], clean_up_tokenization_spaces=False
    )
    ends = [backend.token_to_id(token) for token in model.special[: model.num_ends]]
    return Vocabulary(num_ids(tokenizer) + model.padding, tokenizer, ends)  # type: ignore[arg-type]
