"""Bytes of every token.

Tokenizers encode bytes differently: byte-level BPE in the 256 letters of GPT-2's alphabet,
SentencePiece with ``▁`` for the space and ``<0xNN>`` for a byte that has no piece, WordPiece with
``##`` on pieces that continue a word. Without a decoder, tokens are words with spaces between them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import tokenizers

from adapters.vocabulary.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_BEFORE = "\0"
"""A piece that every decoder leaves as it is."""


def known_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that have a token. Ids may have gaps, so the highest can exceed their number."""
    get_vocab: Callable[[], dict[str, int]] | None = getattr(tokenizer, "get_vocab", None)
    ids = range(len(tokenizer)) if get_vocab is None else get_vocab().values()
    return frozenset(ids).union(getattr(tokenizer, "added_tokens_decoder", ()))


def num_ids(tokenizer: Tokenizer) -> int:
    """One more than the tokenizer's highest id."""
    kept = _kept(tokenizer)
    if kept is not None:
        return len(kept)
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
    piece without ``##``), whether or not the decoder would drop it at the beginning of a text. The
    decoder reads an added token as it reads a piece: Gemma's ``▁▁`` is two spaces. Where it joins
    words, punctuation may have no space (WordPiece's clean-up), and added tokens have one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._spelling = _spelling(tokenizer)

    def __call__(self, token_ids: Sequence[int]) -> list[bytes]:
        """``b""`` for special tokens and for ids without a token."""
        pieces = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return [self._bytes_of(token_id, piece) for token_id, piece in zip(token_ids, pieces, strict=True)]

    def _bytes_of(self, token_id: int, piece: str | bytes | None) -> bytes:
        if not piece or token_id in self._special:
            return b""
        return piece if isinstance(piece, bytes) else self._spelling(token_id, piece)


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """The bytes that each id adds to a text, as `TokenSpelling` has it.

    Args:
        tokenizer: Hugging Face tokenizer.
        size: Width of a row of logits.

    Returns:
        ``size`` byte strings; ``b""`` for special tokens, for padding and for ids without a token.
    """
    kept = _kept(tokenizer)
    known = min(size, num_ids(tokenizer))
    return (TokenSpelling(tokenizer)(range(known)) if kept is None else kept[:known]) + [b""] * (size - known)


def _kept(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of every id, where a tokenizer has them already."""
    kept: list[bytes] | None = getattr(tokenizer, "kept_token_bytes", None)
    return kept


class _ByteLevel:
    """GPT-2's byte alphabet: printable Latin-1 as itself, the other 68 bytes from U+0100 on."""

    def __init__(self) -> None:
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = count(0x100)
        letters = "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
        self._byte_of = codecs.charmap_build(letters)

    def __call__(self, token_id: int, piece: str) -> bytes:
        try:
            return codecs.charmap_encode(piece, "strict", self._byte_of)[0]
        except UnicodeEncodeError:
            return piece.encode()


def _byte_of(piece: str) -> bytes | None:
    """The byte that a piece of byte fallback stands for."""
    found = _BYTE_PIECE.fullmatch(piece)
    return None if found is None else bytes([int(found[1], 16)])


class _SentencePiece:
    def __init__(self, space: str, *, has_bytes: bool) -> None:
        self._space, self._has_bytes = space, has_bytes

    def __call__(self, token_id: int, piece: str) -> bytes:
        byte = _byte_of(piece) if self._has_bytes else None
        return piece.replace(self._space, " ").encode() if byte is None else byte


class _EndOfWord:
    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def __call__(self, token_id: int, piece: str) -> bytes:
        if piece.endswith(self._suffix):
            return f"{piece[: -len(self._suffix)]} ".encode()
        return piece.encode()


class _Behind:
    """Whatever the decoder adds for a piece behind another one, as a word's space."""

    def __init__(self, decoder: Any, *, has_bytes: bool) -> None:
        self._decoder, self._has_bytes = decoder, has_bytes

    def __call__(self, token_id: int, piece: str) -> bytes:
        byte = _byte_of(piece) if self._has_bytes else None
        if byte is not None:
            return byte
        if self._decoder is None:
            return f" {piece}".encode()
        text: str = self._decoder.decode([_BEFORE, piece])
        return text.removeprefix(_BEFORE).encode()


class _Decoded:
    """Whatever the tokenizer decodes the single id to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int, piece: str) -> bytes:
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


_Spelling = _ByteLevel | _SentencePiece | _EndOfWord | _Behind | _Decoded


def _spelling(tokenizer: Tokenizer) -> _Spelling:
    """The spelling that the decoder tells, or the form of the pieces where it is not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return _spelling_of(backend.decoder)
    known = list(range(num_ids(tokenizer)))
    pieces = {piece for piece in tokenizer.convert_ids_to_tokens(known) if isinstance(piece, str)}
    if {"Ġ", "Ċ", "Ā"} <= pieces:
        return _ByteLevel()
    if "<0x0A>" in pieces or any(piece.startswith("▁") for piece in pieces):
        return _SentencePiece("▁", has_bytes=True)
    return _Decoded(tokenizer)


def _spelling_of(decoder: Any) -> _Spelling:
    """The spelling of a decoder of the tokenizers library, None if there is none."""
    parts = _parts(decoder)
    has_bytes = any(part["type"] == "ByteFallback" for part in parts)
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            return _ByteLevel()
        if kind == "Metaspace":
            return _SentencePiece(part["replacement"], has_bytes=has_bytes)
        if kind == "Replace" and part["content"] == " " and "String" in part["pattern"]:
            return _SentencePiece(part["pattern"]["String"], has_bytes=has_bytes)
        if kind == "BPEDecoder" and part["suffix"]:
            return _EndOfWord(part["suffix"])
    return _Behind(decoder, has_bytes=has_bytes)


def _parts(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
