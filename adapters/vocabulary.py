"""What processors may know of the model's vocabulary, computed once per model and shared by all requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...
    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...
    def __len__(self) -> int: ...


class Vocabulary:
    """Ids, bytes and text of a model's tokens.

    Args:
        size: Width of a row of logits; ids are below it. Ids from the tokenizer's length on are padding.
        tokenizer: Hugging Face fast tokenizer, or None where only ids are used.
        eos_token_ids: Ids that end an answer by default.
    """

    def __init__(self, size: int, tokenizer: Tokenizer | None = None, eos_token_ids: Sequence[int] = ()) -> None:
        self.size = size
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._derived: dict[str, Any] = {}

    @cached_property
    def num_tokens(self) -> int:
        """Ids that stand for a token; the rest of the row is padding that is never sampled."""
        return self.size if self.tokenizer is None else min(self.size, len(self.tokenizer))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` without special tokens.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, and this model was loaded without one; give token ids")
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens included.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("decoding needs a tokenizer, and this model was loaded without one")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """UTF-8 bytes of each id, ``b""`` for special tokens and padding. Single bytes of a character stay single."""
        from adapters.token_bytes import token_bytes

        if self.tokenizer is None:
            raise ValueError("token bytes need a tokenizer, and this model was loaded without one")
        return token_bytes(self.tokenizer, self.size)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of special tokens, the tokenizer's own list and the end tokens."""
        listed = getattr(self.tokenizer, "all_special_ids", ())
        return frozenset(listed) | self.eos_token_ids

    def derived(self, key: str, make: Callable[[], T]) -> T:
        """``make()``, computed once per vocabulary and key: masks by script, tokenizer tries, compiled grammars' environment."""
        if key not in self._derived:
            self._derived[key] = make()
        value: T = self._derived[key]
        return value
