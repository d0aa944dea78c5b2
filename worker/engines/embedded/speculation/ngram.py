"""N-gram drafts (prompt lookup): what followed the newest tokens when they last occurred."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft, repeat

_MOST_COMPARED = 32
"""Tokens before an n-gram that are compared, to see how much of the history it repeats."""

_FACTOR = 0x9E3779B1
"""Base of the polynomial that makes a key of an n-gram: 2**32 by the golden ratio (Knuth)."""

_LEAST_SLOTS = 4096
"""Slots that a table has at least."""


class NgramProposer:
    """Implements `Proposer`: prompt lookup (Saxena 2023) over prompt and answer.

    The longest of the n-grams at the end of the history that occurred before counts, and of its
    occurrences the latest, since texts tend to continue as they did last.

    The place where an n-gram last ended stands in a table, at a key of its tokens. Where two have
    one key, the later one has it, and the earlier one is not found: a prompt of 100,000 tokens
    takes a few milliseconds and megabytes.

    Args:
        shortest: Tokens of the shortest n-gram that is looked up.
        longest: Tokens of the longest one.
    """

    name = "ngram"
    is_model = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._tokens: array[int] = array("q")
        self._ends: list[array[int]] = []  # by size: past which token an n-gram ended that another followed, by key
        self._mask = 0
        self._keys: list[int] = []  # of the n-grams at the end of the tokens, by size

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        self._follow(history)
        tokens = self._tokens
        for index in range(len(self._keys) - 1, -1, -1):
            size, end = self._sizes[index], self._ends[index][self._keys[index]]
            if end and tokens[end - size : end] == tokens[-size:]:
                return Draft(list(repeat(tokens, end, limit)), self._length(end, size))
        return NO_DRAFT

    def _length(self, end: int, known: int) -> int:
        """Number of tokens before `end` that equal those at the history's end; `known` ones do."""
        tokens, most = self._tokens, min(end, _MOST_COMPARED)
        while known < most and tokens[end - known - 1] == tokens[-known - 1]:
            known += 1
        return known

    def _follow(self, history: Sequence[int]) -> None:
        num_known = len(self._tokens)
        is_other = num_known and (len(history) < num_known or history[num_known - 1] != self._tokens[-1])
        if is_other or 2 * len(history) > self._mask:
            self._read(history)
            return
        for index in range(num_known, len(history)):
            for ends, key in zip(self._ends, self._keys, strict=False):
                ends[key] = index
            self._tokens.append(history[index])
            self._keys = self._keys_of_end()

    def _read(self, history: Sequence[int]) -> None:
        """Begin with a history, in tables that have room for as much again."""
        self._tokens = array("q", history)
        self._mask = max(_LEAST_SLOTS, 2 ** (4 * len(history)).bit_length()) - 1
        self._ends = [array("i", bytes(4 * (self._mask + 1))) for _ in self._sizes]
        tokens = np.frombuffer(self._tokens, dtype=np.int64)
        keys = np.zeros(len(tokens), dtype=np.int64)  # of the n-grams that end before each token
        for size in range(1, min(self._sizes.stop, len(tokens))):
            keys[size:] = (keys[size:] * _FACTOR + tokens[: len(tokens) - size]) & self._mask
            if size in self._sizes:
                np.frombuffer(self._ends[size - self._sizes.start], dtype=np.int32)[keys[size:]] = np.arange(
                    size, len(tokens), dtype=np.int32
                )
        self._keys = self._keys_of_end()

    def _keys_of_end(self) -> list[int]:
        tokens, mask, key, found = self._tokens, self._mask, 0, []
        for size in range(1, min(self._sizes.stop, len(tokens) + 1)):
            key = (key * _FACTOR + tokens[-size]) & mask
            if size >= self._sizes.start:
                found.append(key)
        return found
