"""What processors may know of the model's vocabulary, computed once per model and shared by all requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock, RLock
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
        path: Directory that the tokenizer can be loaded from again, in another process.
    """

    def __init__(
        self,
        size: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        *,
        path: str | None = None,
    ) -> None:
        self.size = size
        self.path = path
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._derived: dict[str, Any] = {}
        self._lock = RLock()

    @classmethod
    def from_pretrained(cls, path: str, size: int, eos_token_ids: Sequence[int] | None = None) -> Vocabulary:
        """The vocabulary of a checkpoint.

        Args:
            path: Local directory of the checkpoint; code in it is never run.
            size: Width of a row of logits.
            eos_token_ids: The tokenizer's own by default.

        Raises:
            OSError: there is no tokenizer in it.
        """
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return cls(size, tokenizer, eos_token_ids, path=path)

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
        """``make()``, once per vocabulary and key: masks by script, tokenizer tries, the cache of compiled grammars."""
        with self._lock:  # chains are built in threads, and the tokenizer's trie of a grammar takes a second to make
            if key not in self._derived:
                self._derived[key] = make()
            value: T = self._derived[key]
            return value

    def __reduce__(self) -> tuple[Callable[..., Vocabulary], tuple[Any, ...]]:
        """By path where there is one, else with the tokenizer; what was derived is derived again."""
        eos_token_ids = tuple(sorted(self.eos_token_ids))
        if self.path is not None:
            return vocabulary_at, (self.path, self.size, eos_token_ids)
        return Vocabulary, (self.size, self.tokenizer, eos_token_ids)


_BY_PATH: dict[tuple[str, int, tuple[int, ...] | None], Vocabulary] = {}
_BY_PATH_LOCK = Lock()


def vocabulary_at(path: str, size: int, eos_token_ids: tuple[int, ...] | None = None) -> Vocabulary:
    """`Vocabulary.from_pretrained`, once per process: what is left of a vocabulary that was pickled into another one.

    Raises:
        OSError: there is no tokenizer at ``path``.
    """
    key = (path, size, eos_token_ids)
    with _BY_PATH_LOCK:
        if key not in _BY_PATH:
            _BY_PATH[key] = Vocabulary.from_pretrained(path, size, eos_token_ids)
        return _BY_PATH[key]
