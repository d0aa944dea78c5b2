"""`CopiedTokenizer`: what is used of a Hugging Face tokenizer, without transformers."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

import tokenizers

from adapters.vocabulary.token_bytes import num_ids, token_bytes

_PROBES = (
    *("", " ", "Hello world!", " Hello  world !\n\n", "it's , isn 't . ?", "\tdef f(x):\n    return x[0] + 1.5e-3"),
    *("Grüße, 世界 👩‍👩‍👧 e\u0301 ", "\u2581 Ġ <0x0A> ##ing [UNK]", "a" * 300, "\x00\x7f\u200b\ufeff"),
)
"""Texts in which tokenizers differ: spaces, punctuation, what some of them treat specially."""

_NUM_RANDOM_TEXTS = 64


@dataclass(frozen=True, slots=True)
class CopiedToken:
    """An added token: its text, and whether it is special."""

    content: str
    special: bool


class CopiedTokenizer:
    """Implements `Tokenizer` by the tokenizers library alone.

    transformers takes seconds to import and to read a tokenizer, and after that is a wrapper around
    this library. What it made is kept, so that another process needs only the library.

    Args:
        content: Result of `to_json`.

    Raises:
        LookupError, TypeError, ValueError: `content` is something else.

    Attributes:
        added_tokens_decoder: Added tokens by id.
        all_special_ids: Ids of special tokens.
        eos_token_id: The tokenizer's own end token, None if it has none.
        kept_token_bytes: The bytes that each id adds to a text, as `token_bytes.TokenSpelling` has
            them.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._backend, self._num_tokens, self._lock = str(content["backend"]), int(content["size"]), Lock()
        self._read: tokenizers.Tokenizer | None = None
        self.added_tokens_decoder = {
            int(token_id): CopiedToken(str(text), bool(special)) for token_id, text, special in content["added"]
        }
        self.all_special_ids = [int(token_id) for token_id in content["special"]]
        self.eos_token_id: int | None = content["end"]
        block = base64.b64decode(content["bytes"])
        ends = accumulate(content["lengths"], initial=0)
        self.kept_token_bytes = [block[start:end] for start, end in pairwise(ends)]

    @staticmethod
    def to_json(tokenizer: Any) -> dict[str, Any] | None:
        """Content of the copy of transformers' `tokenizer`, JSON data.

        None if a copy would differ: transformers has code of its own for it, or it has no backend.
        """
        backend = copy(getattr(tokenizer, "backend_tokenizer", None))
        if not isinstance(backend, tokenizers.Tokenizer):
            return None
        backend.no_padding()
        backend.no_truncation()
        pieces = token_bytes(tokenizer, num_ids(tokenizer))
        content = {
            "backend": backend.to_str(),
            "size": backend.get_vocab_size(with_added_tokens=True),
            "added": [[id, str(token), token.special] for id, token in tokenizer.added_tokens_decoder.items()],
            "special": list(tokenizer.all_special_ids),
            "end": tokenizer.eos_token_id,
            "bytes": base64.b64encode(b"".join(pieces)).decode(),
            "lengths": [len(piece) for piece in pieces],
        }
        return content if _agree(tokenizer, CopiedTokenizer(content)) else None

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """Tokenizer of the tokenizers library, as transformers configures it.

        Read when it is first used, which keeps other threads from Python for a while: 0.1 s for
        50,000 tokens. A worker starts without it, since the tokens' bytes are at hand.
        """
        with self._lock:
            if self._read is None:
                self._read = tokenizers.Tokenizer.from_str(self._backend)
                self._backend = ""
            return self._read

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            backend = self._backend if self._read is None else self._read.to_str()
        return {**vars(self), "_backend": backend, "_read": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def __len__(self) -> int:
        return self._num_tokens

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens, added ones included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Tokens as the vocabulary spells them, None for ids without one."""
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as a prompt."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of token ids; ``skip_special_tokens`` is off by default."""
        return self.backend_tokenizer.decode(token_ids, **{"skip_special_tokens": False, **kwargs})


def _agree(tokenizer: Any, copied: CopiedTokenizer) -> bool:
    """Whether both have the same tokens, and give the same ids and texts for many probes."""
    vocabulary = copied.get_vocab()
    known = sorted({*vocabulary.values(), *copied.added_tokens_decoder})
    if len(tokenizer) != len(copied) or tokenizer.get_vocab() != vocabulary:
        return False
    if tokenizer.convert_ids_to_tokens(known) != copied.convert_ids_to_tokens(known):
        return False
    texts = [tokenizer.encode(text) for text in _PROBES]
    return all(
        tokenizer.encode(text, add_special_tokens=adds) == copied.encode(text, add_special_tokens=adds)
        for text in (
            *_PROBES,
            *(f"a {token.content} b{token.content}" for token in copied.added_tokens_decoder.values()),
        )
        for adds in (True, False)
    ) and all(
        tokenizer.decode(ids, skip_special_tokens=skips) == copied.decode(ids, skip_special_tokens=skips)
        for ids in (*texts, *_random_texts(known), *([token_id] for token_id in copied.added_tokens_decoder))
        for skips in (True, False)
    )


def _random_texts(ids: Sequence[int]) -> Iterator[list[int]]:
    chosen = random.Random(0)
    return ([*chosen.choices(ids, k=length)] for length in range(_NUM_RANDOM_TEXTS))
