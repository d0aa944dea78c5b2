"""The kit's model: a small tokenizer with every feature of real ones, and no weights."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from typing import Any

import torch

from adapters.contract import Context
from adapters.vocabulary import Vocabulary, vocabulary_at

END, THINK, THINK_END = "<|end|>", "<think>", "</think>"

KEY_ID = "kit"
"""Id of the operator's watermark key in the kit's context."""

NUM_PADDING = 13
"""Padding of the row, which also makes its width no multiple of 32."""

_PIECES = 380

_TEXT = """
The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox runs away over the hill.
A request asks for one thing, and the answer must give that thing. Yes or no? True or false?
Wait, let me think about this step by step. First, we read the question. Then we answer the question.
Hello world! How are you today? I am fine, thank you. See also: references, notes and further reading.
{"name": "Ada", "age": 36, "tags": ["red", "green", "blue"], "ok": true, "none": null}
One, two, three, four, five. 0 1 2 3 4 5 6 7 8 9 10 42 100.
Grüße, señor, ça va. Привет, как дела? 你好,世界。日本語の文章です。 🙂
"""


@cache
def kit_vocabulary() -> Vocabulary:
    """A byte-level vocabulary with merges, special tokens, thinking tags and padding; kept on disk.

    Processors rebuilt in another process load its tokenizer from its path, like a checkpoint's.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_PIECES,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([THINK, THINK_END])
    directory = tempfile.mkdtemp(prefix="logits-conformance-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)  # type: ignore[no-untyped-call]
    fast.save_pretrained(directory)
    return vocabulary_at(directory, len(fast) + NUM_PADDING, (fast.eos_token_id,))


def second_row(size: int, position: int) -> torch.Tensor:
    """Logits float32 ``[size]`` of a companion for the token at a position."""
    return torch.randn(size, generator=torch.Generator().manual_seed(position)) * 2.0


def kit_context(*, choice: int = 0) -> Context:
    """The context of a request for choice number ``choice``."""
    vocabulary = kit_vocabulary()
    return Context(
        vocabulary,
        end_token_ids=vocabulary.eos_token_ids,
        seed=2**63 + 11,
        choice=choice,
        max_tokens=512,
        watermark_keys={KEY_ID: b"conformance kit!" * 2},
        think_start=tuple(vocabulary.encode(THINK)),
        think_end=tuple(vocabulary.encode(THINK_END)),
    )
