"""Bytes of every token, and an index over them.

Tokenizers encode bytes differently: byte-level BPE in the 256 letters of GPT-2's alphabet,
SentencePiece with ``▁`` for the space and ``<0xNN>`` for a byte that has no piece, WordPiece with
``##`` on pieces that continue a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from adapters.vocabulary.vocabulary import Address, Tokenizer, Vocabulary

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def known_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that have a token. Ids may have gaps, so the highest can exceed their number."""
    get_vocab: Callable[[], dict[str, int]] | None = getattr(tokenizer, "get_vocab", None)
    ids = range(len(tokenizer)) if get_vocab is None else get_vocab().values()
    return frozenset(ids).union(getattr(tokenizer, "added_tokens_decoder", ()))


def num_ids(tokenizer: Tokenizer) -> int:
    """One more than the tokenizer's highest id."""
    return max(known_ids(tokenizer), default=-1) + 1


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of special tokens: those added as special, and the tokenizer's own list."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    listed = getattr(tokenizer, "all_special_ids", ())
    return frozenset(token_id for token_id, token in added.items() if token.special) | frozenset(listed)


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that stand outside the tokenizer's model, special or not, by their text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token.content): token_id for token_id, token in added.items() if str(token.content)}


class TokenSpelling:
    """The bytes that each id adds to a text, for given ids.

    Byte-level pieces and byte-fallback pieces give their very bytes, so a character that is split
    over tokens stays split. A piece that begins a word carries its space (``▁``, ``Ġ``, a WordPiece
    piece without ``##``), whether or not the decoder would drop it at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._added = {token_id: text.encode() for text, token_id in added_tokens(tokenizer).items()}
        self._spelling = _spelling(tokenizer)

    def __call__(self, token_ids: Sequence[int]) -> list[bytes]:
        """``b""`` for special tokens and for ids without a token."""
        pieces = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return [self._bytes_of(token_id, piece) for token_id, piece in zip(token_ids, pieces, strict=True)]

    def _bytes_of(self, token_id: int, piece: str | bytes | None) -> bytes:
        if not piece or token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id]
        return piece if isinstance(piece, bytes) else self._spelling(token_id, piece)


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """The bytes that each id adds to a text, as `TokenSpelling` has it.

    Args:
        tokenizer: Hugging Face tokenizer.
        size: Width of a row of logits.

    Returns:
        ``size`` byte strings; ``b""`` for special tokens, for padding and for ids without a token.
    """
    known = min(size, num_ids(tokenizer))
    return TokenSpelling(tokenizer)(range(known)) + [b""] * (size - known)


class _ByteLevel:
    """GPT-2's byte alphabet: printable Latin-1 as itself, the other 68 bytes from U+0100 on."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of.update((chr(0x100 + i), byte) for i, byte in enumerate(others))

    def __call__(self, token_id: int, piece: str) -> bytes:
        try:
            return bytes([self._byte_of[letter] for letter in piece])
        except KeyError:
            return piece.encode()


class _SentencePiece:
    def __init__(self, space: str) -> None:
        self._space = space

    def __call__(self, token_id: int, piece: str) -> bytes:
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(self._space, " ").encode()


class _WordPiece:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, token_id: int, piece: str) -> bytes:
        if piece.startswith(self._prefix) and piece != self._prefix:
            return piece[len(self._prefix) :].encode()
        return f" {piece}".encode()


class _EndOfWord:
    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def __call__(self, token_id: int, piece: str) -> bytes:
        if piece.endswith(self._suffix):
            return f"{piece[: -len(self._suffix)]} ".encode()
        return piece.encode()


class _Decoded:
    """Whatever the tokenizer decodes the single id to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int, piece: str) -> bytes:
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


_Spelling = _ByteLevel | _SentencePiece | _WordPiece | _EndOfWord | _Decoded


def _spelling(tokenizer: Tokenizer) -> _Spelling:
    """By the decoder if there is one, else by the form of the pieces."""
    for part in _decoder_parts(tokenizer):
        kind = part["type"]
        if kind == "ByteLevel":
            return _ByteLevel()
        if kind == "Metaspace":
            return _SentencePiece(part["replacement"])
        if kind == "Replace" and part["content"] == " " and "String" in part["pattern"]:
            return _SentencePiece(part["pattern"]["String"])
        if kind == "ByteFallback":
            return _SentencePiece("▁")
        if kind == "WordPiece":
            return _WordPiece(part["prefix"])
        if kind == "BPEDecoder" and part["suffix"]:
            return _EndOfWord(part["suffix"])
    known = list(range(num_ids(tokenizer)))
    pieces = {piece for piece in tokenizer.convert_ids_to_tokens(known) if isinstance(piece, str)}
    if {"Ġ", "Ċ", "Ā"} <= pieces:
        return _ByteLevel()
    if "<0x0A>" in pieces or any(piece.startswith("▁") for piece in pieces):
        return _SentencePiece("▁")
    return _Decoded(tokenizer)


def _decoder_parts(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return
    state = json.loads(decoder.__getstate__())
    yield from state["decoders"] if state["type"] == "Sequence" else [state]


class ByteIndex:
    """Searchable index of the bytes of every token.

    Args:
        tokens: Bytes by id.
        address: Of their vocabulary: pickles are rebuilt from it in another process.
    """

    def __init__(self, tokens: Sequence[bytes], address: Address | None = None) -> None:
        self._address = address
        self._block = b"".join(tokens)
        self._starts = np.zeros(len(tokens) + 1, dtype=np.int64)
        np.cumsum([len(token) for token in tokens], out=self._starts[1:])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one id, ``b""`` for an id outside the vocabulary."""
        if not 0 <= token_id < len(self):
            return b""
        return self._block[self._starts[token_id] : self._starts[token_id + 1]]

    def __reduce__(self) -> tuple[object, ...]:
        if self._address is not None:
            return _byte_index_at, self._address
        return ByteIndex, ([self[token_id] for token_id in range(len(self))],)

    @cached_property
    def ids(self) -> dict[bytes, list[int]]:
        """Ids by their bytes, lowest first; special tokens are left out."""
        ids: dict[bytes, list[int]] = {}
        for token_id in np.flatnonzero(np.diff(self._starts)).tolist():
            ids.setdefault(self[token_id], []).append(token_id)
        return ids

    @cached_property
    def longest(self) -> int:
        """Length of the longest token, bytes."""
        return int(np.diff(self._starts).max(initial=0))

    def containing(self, text: bytes) -> list[int]:
        """Ids of the tokens that contain ``text`` (not empty), ascending."""
        positions, ids = self._occurrences(text)
        return sorted(set(ids[positions + len(text) <= self._starts[ids + 1]].tolist()))

    def touching(self, text: bytes) -> dict[int, bytes]:
        """Every token that can hold a part of an occurrence of ``text`` in consecutive tokens.

        They contain it, end with its beginning, begin with its end, or lie within it. Any other
        token interrupts an occurrence.
        """
        found = set(self.containing(text))
        for length in range(1, min(len(text), self.longest + 1)):
            positions, ids = self._occurrences(text[:length])
            found.update(ids[positions + length == self._starts[ids + 1]].tolist())
            positions, ids = self._occurrences(text[-length:])
            found.update(ids[positions == self._starts[ids]].tolist())
        for begin in range(1, len(text) - 1):
            for end in range(begin + 1, min(len(text), begin + self.longest + 1)):
                found.update(self.ids.get(text[begin:end], ()))
        return {token_id: self[token_id] for token_id in sorted(found) if self[token_id]}

    @cached_property
    def _lengths(self) -> list[int]:
        """Lengths that tokens have, longest first."""
        return [length for length in np.unique(np.diff(self._starts))[::-1].tolist() if length]

    def spell(self, text: bytes) -> list[int] | None:
        """The fewest ids that spell ``text``, in ties the longest token first, or None."""
        first_ids = self.first_ids(text)
        spelled: list[int] = []
        at = 0
        while at < len(text):
            token_id = first_ids[at]
            if token_id is None:
                return None
            spelled.append(token_id)
            at += len(self[token_id])
        return spelled

    def first_ids(self, text: bytes) -> list[int | None]:
        """For each index into ``text``, the first id of `spell` for the rest, or None."""
        fewest: list[int | None] = [None] * len(text) + [0]
        first_ids: list[int | None] = [None] * len(text)
        for at in range(len(text) - 1, -1, -1):
            for length in self._lengths:
                rest = fewest[at + length] if at + length <= len(text) else None
                if rest is None or text[at : at + length] not in self.ids:
                    continue
                best = fewest[at]
                if best is None or rest + 1 < best:
                    fewest[at], first_ids[at] = rest + 1, self.ids[text[at : at + length]][0]
        return first_ids

    def _occurrences(
        self, text: bytes
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
        """Offsets of ``text`` in the block, and the token at each of them."""
        offsets = []
        at = self._block.find(text)
        while at >= 0:
            offsets.append(at)
            at = self._block.find(text, at + 1)
        positions = np.array(offsets, dtype=np.int64)
        return positions, np.searchsorted(self._starts, positions, side="right") - 1


def byte_index(vocabulary: Vocabulary) -> ByteIndex:
    """The index of a vocabulary, made once.

    Raises:
        ValueError: there is no tokenizer.
    """
    return vocabulary.derived("byte_index", lambda: ByteIndex(vocabulary.token_bytes, vocabulary.address))


def _byte_index_at(*address: Any) -> ByteIndex:
    from adapters.vocabulary.vocabulary import vocabulary_at

    return byte_index(vocabulary_at(*address))
