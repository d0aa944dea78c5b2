"""Index of a prompt's n-grams and the tokens that followed each, built in a few passes.

N-grams are distinguished by polynomial hashes modulo 2**64 (Karp and Rabin, 1987) with a random
base per process. The index does not depend on it: n-grams of equal hash are compared token by token
while the index is built, and if two differ it is rebuilt with another base; look-ups compare once
more.
"""

from __future__ import annotations

import secrets
from typing import Any, TypeAlias

import numpy as np

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

MODULUS = 2**64
_COMPARED_TOGETHER = 1 << 18
"""Tokens of n-gram pairs compared at a time: 4 MiB of copies."""


def draw_base() -> int:
    """An odd number below 2**64; 5 modulo 8, so that its powers repeat as late as possible."""
    return secrets.randbits(61) * 8 + 5


_BASE = draw_base()


class PromptNgrams:
    """A prompt's n-grams by their first ``length`` = n - 1 tokens, with their followers. Immutable.

    Args:
        tokens: int64 ``[L]``, the prompt.
        length: n - 1.
        base: Base of the hashes.

    Attributes:
        heads: Hashes of the prompt's longest prefixes, ``heads[-1]`` of all of it, for hashing
            n-grams that begin in the prompt and end after it. ``length + 1`` of them, at most ``L +
            1``.
    """

    def __init__(self, tokens: Ids, length: int, base: int = _BASE) -> None:
        self._tokens, self._length = tokens, length
        while not self._try(base):
            base = draw_base()

    def _try(self, base: int) -> bool:
        """Build the index; returns whether n-grams of equal hash are equal."""
        self._base, self._power = base, pow(base, self._length, MODULUS)
        heads = prefix_hashes(self._tokens, base)
        self.heads: list[int] = heads[-(self._length + 1) :].tolist()
        count = max(0, len(self._tokens) - self._length)
        hashes = heads[self._length : self._length + count] - heads[:count] * np.uint64(self._power)
        order = np.argsort(hashes)
        self._hashes, self._positions = hashes[order], order.astype(np.int32)
        twins = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        return not self._length or not len(twins) or self._are_same(self._positions[twins], self._positions[twins + 1])

    def _are_same(self, positions: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> bool:
        windows = np.lib.stride_tricks.sliding_window_view(self._tokens, self._length)
        step = max(1, _COMPARED_TOGETHER // self._length)
        return all(
            np.array_equal(windows[positions[i : i + step]], windows[others[i : i + step]])
            for i in range(0, len(positions), step)
        )

    def head(self, before: int, token_id: int) -> int:
        """Hash of the prefix one token longer than that of hash ``before``."""
        return (before * self._base + token_id + 1) % MODULUS

    def window(self, before: int, after: int) -> int:
        """Hash of the ``length`` tokens between two prefixes."""
        return (after - before * self._power) % MODULUS

    def find(self, window: int) -> tuple[int, list[int]] | None:
        """First position of the n - 1 tokens of this hash, and their followers in order."""
        hashes, tokens, key = self._hashes, self._tokens, np.uint64(window)
        low = int(hashes.searchsorted(key))
        if low == len(hashes) or hashes[low] != key:
            return None
        if low + 1 == len(hashes) or hashes[low + 1] != key:
            position = int(self._positions[low])
            return position, [int(tokens[position + self._length])]
        positions = np.sort(self._positions[low : hashes.searchsorted(key, side="right")])
        return int(positions[0]), list(dict.fromkeys(tokens[positions + self._length].tolist()))


def prefix_hashes(tokens: Ids, base: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """uint64 ``[L + 1]``: ``h[0] = 0``, ``h[i + 1] = h[i] * base + tokens[i] + 1`` modulo 2**64.

    Closed form for all i: ``h[i + 1]`` is the sum of ``(tokens[j] + 1) / base**(j + 1)`` times
    ``base**(i + 1)``.
    """
    heads = np.zeros(len(tokens) + 1, dtype=np.uint64)
    powers = np.cumprod(np.full(len(tokens), base, dtype=np.uint64))
    inverses = np.cumprod(np.full(len(tokens), pow(base, -1, MODULUS), dtype=np.uint64))
    heads[1:] = np.cumsum((tokens + 1).astype(np.uint64) * inverses) * powers
    return heads
