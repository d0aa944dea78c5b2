"""N-gram drafts (prompt lookup): what followed the newest tokens when they last occurred."""

from __future__ import annotations

from collections.abc import Sequence


class NgramProposer:
    """Implements `Proposer`: prompt lookup (Saxena 2023) over prompt and answer.

    The longest of the n-grams at the end of the history that occurred before counts, and of its
    occurrences the latest, since texts go on as they went on last.

    Args:
        shortest: Tokens of the shortest n-gram that is looked up.
        longest: Of the longest one.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._forget()

    def _forget(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each n-gram that something follows: where it last ended

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """See `Proposer.propose`."""
        self._follow(history)
        for size in self._sizes:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) > size else None
            if end is not None:
                return self._tokens[end : end + limit]
        return ()

    def _follow(self, history: Sequence[int]) -> None:
        tokens = self._tokens
        if tokens and (len(history) < len(tokens) or history[len(tokens) - 1] != tokens[-1]):
            self._forget()
            tokens = self._tokens
        for index in range(len(tokens), len(history)):
            for size in self._sizes:  # n-grams before this token, which follows them
                if index >= size:
                    self._ends[tuple(tokens[index - size :])] = index
            tokens.append(history[index])
