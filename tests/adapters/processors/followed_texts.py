"""Texts written byte by byte into a constrained answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import Context
from adapters.vocabulary import Vocabulary

NUM_BYTES, END, PYTHON_TAG, WIDTH = 256, 256, 257, 270
NAMES = {"<|stop|>": END, "<|python_tag|>": PYTHON_TAG}


class ByteTokenizer:
    """One token for each byte, and two special tokens."""

    all_special_ids: tuple[int, ...] = (END, PYTHON_TAG)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        raise NotImplementedError("the vocabulary is given the bytes of its tokens")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        raise NotImplementedError("nobody decodes here")

    def __len__(self) -> int:
        return NUM_BYTES + 2


class ByteVocabulary(Vocabulary):
    token_bytes: ClassVar = (*(bytes([i]) for i in range(NUM_BYTES)), *[b""] * (WIDTH - NUM_BYTES))

    def encode(self, text: str) -> list[int]:
        for name, token_id in NAMES.items():
            before, found, after = text.partition(name)
            if found:
                return [*before.encode(), token_id, *(self.encode(after) if after else [])]
        return list(text.encode())


VOCABULARY = ByteVocabulary(WIDTH, ByteTokenizer(), [END])
CONTEXT = Context(VOCABULARY, end_token_ids=frozenset({END}))


def text_of(token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones by their names."""
    names = {token_id: name.encode() for name, token_id in NAMES.items()}
    return b"".join(names.get(token_id) or bytes([token_id]) for token_id in token_ids).decode()


def allowed(chain: ProcessorChain) -> set[int]:
    """What a row of equal logits has left."""
    logits = torch.zeros(1, WIDTH)
    planned, failures = plan_rows([(0, chain)])
    assert not failures
    apply_edits(logits, planned)
    return set(torch.nonzero(logits[0] > -torch.inf).flatten().tolist())


def follow(processor: Any, text: str) -> str:
    """``complete``: the answer may be ``text``; ``open``: it may begin so; else where it is cut."""
    return _followed(processor, VOCABULARY.encode(text))


def follow_bytes(processor: Any, text: bytes) -> str:
    """As `follow`, with special tokens spelled by others."""
    return _followed(processor, list(text))


def _followed(processor: Any, token_ids: Sequence[int]) -> str:
    chain = ProcessorChain([processor], CONTEXT)
    chain.start([1])
    for count, token_id in enumerate(token_ids):
        if token_id not in allowed(chain):
            return f"stopped at {count}"
        chain.accept(token_id, chain.position)
    return "complete" if END in allowed(chain) else "open"
