"""`Vocabulary`: what processors know of a model's tokens, computed once and shared."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from threading import Lock, RLock
from typing import Any, TypeAlias, TypeVar

from adapters.vocabulary.byte_index import ByteIndex
from adapters.vocabulary.exact_text import TextEncoder
from adapters.vocabulary.token_bytes import added_tokens, known_ids, num_ids, special_ids, token_bytes
from adapters.vocabulary.tokenizer import Tokenizer

T = TypeVar("T")

Address: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Arguments of `vocabulary_at`, from which a vocabulary can be loaded again."""


class Vocabulary:
    """Ids, bytes and text of a model's tokens.

    Args:
        size: Width of a row of logits; ids are below it. Ids from `num_tokens` on are padding.
        tokenizer: Hugging Face fast tokenizer, or None where only ids are used.
        eos_token_ids: Ids that end an answer by default.
        path: Directory that the tokenizer can be loaded from again, in another process.

    Attributes:
        address: Arguments of `vocabulary_at` that load it again, None without a path.
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
        self.address: Address | None = None if path is None else (path, size, tuple(sorted(self.eos_token_ids)))
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
            TokenizerDamaged: there is no tokenizer in it, or one that cannot be read; names the
                file that is wrong.
        """
        from transformers import AutoTokenizer

        tokenizer: Any
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of any class: the tokenizers library raises bare Exception
            from adapters.vocabulary.tokenizer_files import explain

            raise explain(Path(path), error) from error
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return cls(size, tokenizer, eos_token_ids, path=path)

    @cached_property
    def num_tokens(self) -> int:
        """Ids from here on are padding of the row, never sampled.

        One more than the tokenizer's highest id, not the number of its tokens: ids may have gaps.
        """
        return self.size if self.tokenizer is None else min(self.size, num_ids(self.tokenizer))

    @cached_property
    def gap_ids(self) -> frozenset[int]:
        """Ids below `num_tokens` without a token. Of ids that share a piece, all have a token."""
        if self.tokenizer is None:
            return frozenset()
        unknown = sorted(frozenset(range(self.num_tokens)) - known_ids(self.tokenizer))
        pieces = self.tokenizer.convert_ids_to_tokens(unknown) if unknown else []
        return frozenset(token_id for token_id, piece in zip(unknown, pieces, strict=True) if piece is None)

    @cached_property
    def never_ids(self) -> tuple[int, ...]:
        """Ids without a token, padding of the row among them, that end no answer: an engine rules
        them out.
        """
        without = (*sorted(self.gap_ids), *range(self.num_tokens, self.size))
        return tuple(token_id for token_id in without if token_id not in self.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids that add exactly ``text`` after any history (see `TextEncoder`).

        Names of added tokens, special or not, are those tokens. No space is put before the text,
        whatever the tokenizer does at the beginning of one. For prompts use the tokenizer itself.

        Raises:
            ValueError: there is no tokenizer, or the text cannot be written in its tokens.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("text needs a tokenizer, and this model was loaded without one; give token ids")
        encoder = self.derived("text_encoder", lambda: TextEncoder(tokenizer, self.size, lambda: byte_index(self)))
        return encoder.encode(text)

    def tag(self, text: str) -> tuple[int, ...]:
        """The id of ``text`` if the tokenizer has it as one token, else nothing."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return ()
        try:
            is_one = text in self._added or text.encode() in self.token_bytes
            ids = self.encode(text) if is_one else []
        except ValueError:  # it cannot write it, or nobody can: half a surrogate pair
            return ()
        return tuple(ids) if len(ids) == 1 else ()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens included.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("decoding needs a tokenizer, and this model was loaded without one")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    @cached_property
    def _added(self) -> dict[str, int]:
        """Ids of added tokens by their text."""
        return {} if self.tokenizer is None else added_tokens(self.tokenizer)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """UTF-8 bytes of each id, ``b""`` for special tokens and padding.

        Tokens that are part of a character keep their single bytes. Processors and grammars know no
        other classification of tokens: one with bytes is text, whatever its text looks like.
        """
        if self.tokenizer is None:
            raise ValueError("token bytes need a tokenizer, and this model was loaded without one")
        return tuple(token_bytes(self.tokenizer, self.size))

    @cached_property
    def digest(self) -> str:
        """128 bits over ids and bytes of the tokens of the tokenizer's model. Added tokens, of
        which programs may make others, have no part in it; it is empty without a tokenizer, and if
        a row of logits is too short for all of its tokens.
        """
        if self.tokenizer is None or self.size < num_ids(self.tokenizer):
            return ""
        added = self.hidden_token_ids.union(self._added.values())  # end tokens are the model's, not the tokenizer's
        texts = [b"" if token_id in added else text for token_id, text in enumerate(self.token_bytes)]
        while texts and not texts[-1]:  # padding of the row
            texts.pop()
        digest = blake2b(array("Q", map(len, texts)).tobytes(), digest_size=16)
        digest.update(b"".join(texts))
        return digest.hexdigest()

    @cached_property
    def hidden_token_ids(self) -> frozenset[int]:
        """Ids that a text without special tokens leaves out: added as such, or in the tokenizer's
        list. An end token need not be one.
        """
        return frozenset() if self.tokenizer is None else special_ids(self.tokenizer)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of special tokens: `hidden_token_ids`, and end tokens."""
        return self.hidden_token_ids | self.eos_token_ids

    @cached_property
    def added_token_ids(self) -> frozenset[int]:
        """Ids of added tokens (outside the tokenizer's model), and of all special ones."""
        return frozenset(self._added.values()) | self.special_token_ids

    def derived(self, key: str, make: Callable[[], T]) -> T:
        """``make()``, once per vocabulary and key: script masks, tries, the grammar cache."""
        with self._lock:  # chains are built in threads, and llguidance's tokenizer takes a second to build
            if key not in self._derived:
                self._derived[key] = make()
            value: T = self._derived[key]
            return value

    def __reduce__(self) -> tuple[Callable[..., Vocabulary], tuple[Any, ...]]:
        """Pickled by path where there is one, else with the tokenizer; derived data is rebuilt."""
        if self.address is not None:
            return vocabulary_at, self.address
        return Vocabulary, (self.size, self.tokenizer, tuple(sorted(self.eos_token_ids)))


_BY_PATH: dict[tuple[str, int, tuple[int, ...] | None], Vocabulary] = {}
_BY_PATH_LOCK = Lock()


def vocabulary_at(path: str, size: int, eos_token_ids: tuple[int, ...] | None = None) -> Vocabulary:
    """`Vocabulary.from_pretrained`, once per process: how pickled vocabularies are restored.

    Raises:
        TokenizerDamaged: there is no tokenizer at ``path`` that can be read.
    """
    key = (path, size, eos_token_ids)
    with _BY_PATH_LOCK:
        if key not in _BY_PATH:
            _BY_PATH[key] = Vocabulary.from_pretrained(path, size, eos_token_ids)
        return _BY_PATH[key]


def byte_index(vocabulary: Vocabulary) -> ByteIndex:
    """The index of a vocabulary, made once; pickles of it are made of the address.

    Raises:
        ValueError: there is no tokenizer.
    """
    rebuilt_by = None if vocabulary.address is None else (_byte_index_at, vocabulary.address)
    return vocabulary.derived("byte_index", lambda: ByteIndex(vocabulary.token_bytes, rebuilt_by))


def _byte_index_at(*address: Any) -> ByteIndex:
    return byte_index(vocabulary_at(*address))
