"""N-gram drafts (prompt lookup): what followed the newest tokens when they last occurred."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft, repeat

_MOST_COMPARED = 32
"""Tokens before an n-gram that are compared, to see how much of the history it repeats."""


class NgramProposer:
    """Implements `Proposer`: prompt lookup (Saxena 2023) over prompt and answer.

    The longest of the n-grams at the end of the history that occurred before counts, and of its
    occurrences the latest, since texts tend to continue as they did last.

    Args:
        shortest: Tokens of the shortest n-gram that is looked up.
        longest: Tokens of the longest one.
    """

    name = "ngram"
    is_model = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._restart()

    def _restart(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each n-gram that something follows: where it last ended

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        self._follow(history)
        for size in self._sizes:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) > size else None
            if end is not None:
                return Draft(repeat(self._tokens, end, limit), self._length(end, size))
        return NO_DRAFT

    def _length(self, end: int, known: int) -> int:
        """Number of tokens before `end` that equal those at the history's end; `known` ones do."""
        tokens, most = self._tokens, min(end, _MOST_COMPARED)
        while known < most and tokens[end - known - 1] == tokens[-known - 1]:
            known += 1
        return known

    def _follow(self, history: Sequence[int]) -> None:
        tokens = self._tokens
        if tokens and (len(history) < len(tokens) or history[len(tokens) - 1] != tokens[-1]):
            self._restart()
            tokens = self._tokens
        for index in range(len(tokens), len(history)):
            for size in self._sizes:  # n-grams before this token, which follows them
                if index >= size:
                    self._ends[tuple(tokens[index - size :])] = index
            tokens.append(history[index])
