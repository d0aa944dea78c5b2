"""An index over the bytes of every token of a vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

_BEGINNING = 3
"""Bytes of a token that tell how long a token may be that begins so."""


class ByteIndex:
    """Searchable index of the bytes of every token.

    Args:
        tokens: Bytes by id.
        rebuilt_by: Function and arguments that make an equal index, for pickles; the tokens by
            default.
    """

    def __init__(
        self, tokens: Sequence[bytes], rebuilt_by: tuple[Callable[..., ByteIndex], tuple[Any, ...]] | None = None
    ) -> None:
        self._rebuilt_by = rebuilt_by
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
        if self._rebuilt_by is not None:
            return self._rebuilt_by
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
            found.update(self._by_length.ending_with(text[:length]))
            found.update(self._by_length.beginning_with(text[-length:]))
        for begin in range(1, len(text) - 1):
            reach = self.beginnings.reach(text[begin:])
            for end in range(begin + 1, min(len(text), begin + reach + 1)):
                found.update(self.ids.get(text[begin:end], ()))
        return {token_id: self[token_id] for token_id in sorted(found)}

    @cached_property
    def _by_length(self) -> _ByLength:
        return _ByLength(self)

    @cached_property
    def beginnings(self) -> Beginnings:
        """The tokens by their first bytes."""
        return Beginnings(self[token_id] for token_id in range(len(self)))

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
        """The first id of `spell` for the rest of ``text`` from each index on, or None."""
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


class Beginnings:
    """Bounds of the lengths and of the number of tokens that begin as a text does.

    Args:
        tokens: Bytes of all tokens.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._longest: dict[bytes, int] = {}  # a short token has all of its own bytes there
        alike = Counter(filter(None, tokens))
        for token in alike:
            beginning = token[:_BEGINNING]
            self._longest[beginning] = max(self._longest.get(beginning, 0), len(token))
        self._most_alike = max(alike.values(), default=0)

    def reach(self, text: bytes) -> int:
        """Length that no token exceeds which begins as ``text`` does, 0 if none does."""
        return max(self._longest.get(text[:length], 0) for length in range(1, _BEGINNING + 1))

    def most_within(self, text: bytes) -> int | None:
        """Number that the tokens do not exceed with which ``text`` begins; None if one may be
        longer than ``text`` and begin with it.
        """
        reach = self.reach(text)
        return reach * self._most_alike if reach <= len(text) and _BEGINNING <= len(text) else None


class _ByLength:
    """The tokens in order of length. A long text has hundreds of beginnings and ends: tokens that
    are too short for one are not looked at, and of the others two bytes before the rest.
    """

    def __init__(self, index: ByteIndex) -> None:
        lengths = [len(index[token_id]) for token_id in range(len(index))]
        self._index = index
        self._ids = np.argsort(lengths, kind="stable")
        self._lengths = np.array(lengths, dtype=np.int64)[self._ids]
        tokens = [index[token_id] for token_id in self._ids.tolist()]
        self._beginnings = _two_bytes(token[:2] for token in tokens)
        self._ends = _two_bytes(token[:-3:-1] for token in tokens)

    def beginning_with(self, text: bytes) -> list[int]:
        """Ids of the tokens that begin with ``text`` (not empty)."""
        ids = self._likely(self._beginnings, text[:2], len(text))
        return [token_id for token_id in ids if self._index[token_id].startswith(text)]

    def ending_with(self, text: bytes) -> list[int]:
        """Ids of the tokens that end with ``text`` (not empty)."""
        ids = self._likely(self._ends, text[:-3:-1], len(text))
        return [token_id for token_id in ids if self._index[token_id].endswith(text)]

    def _likely(self, of_tokens: np.ndarray[Any, np.dtype[np.uint8]], wanted: bytes, length: int) -> list[int]:
        start = int(np.searchsorted(self._lengths, length))
        is_likely = np.ones(len(self._ids) - start, dtype=np.bool_)
        for column, byte in enumerate(wanted):
            is_likely &= of_tokens[start:, column] == byte
        likely: list[int] = self._ids[start:][is_likely].tolist()
        return likely


def _two_bytes(texts: Iterable[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(text.ljust(2, b"\0") for text in texts), dtype=np.uint8).reshape(-1, 2)
