"""Suffix drafts: a suffix automaton over prompt and answers finds the longest repetition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft, repeat

_SEPARATOR = -1
"""Between the answers of a corpus; no token has this id."""


_UPDATED_LINKS = 8
"""Suffix links along which a token updates latest places; all of them would be quadratic for text
that repeats one token."""

_MOST_SEARCHED = 64
"""Tokens of a history that are looked up in a corpus which has been rebuilt."""


@dataclass(slots=True)
class _State:
    """A state of the automaton: the substrings that end at the same places.

    Attributes:
        length: Length of the longest one.
        link: The state of the longest of their suffixes that ends at more places; -1 at the root.
        end: Past the last token of one of these places, mostly the latest.
        next: The state after one more token.
    """

    length: int
    link: int
    end: int
    next: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """Suffix automaton of a growing text (Blumer et al. 1985): amortised constant time per token.

    Attributes:
        tokens: The text.
        repeated: Length of its longest suffix that occurs earlier, and past which token that ends.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.repeated = 0, 0
        self._states = [_State(0, -1, 0)]
        self._last = 0

    def append(self, token: int) -> None:
        """Extend the text."""
        self.tokens.append(token)
        states, end = self._states, len(self.tokens)
        new = len(states)
        states.append(_State(states[self._last].length + 1, 0, end))
        state = self._last
        while state >= 0 and token not in states[state].next:
            states[state].next[token] = new
            state = states[state].link
        if state >= 0:
            states[new].link = self._split(state, token)
        self._last = new
        suffix = states[new].link
        self.repeated = states[suffix].length, states[suffix].end
        for _ in range(_UPDATED_LINKS):
            if suffix <= 0:
                break
            states[suffix].end, suffix = end, states[suffix].link

    def _split(self, state: int, token: int) -> int:
        """The state of the longest substring of `state` with `token`, apart from longer ones."""
        states = self._states
        target = states[state].next[token]
        old, length = states[target], states[state].length + 1
        if length == old.length:
            return target
        clone = len(states)
        states.append(_State(length, old.link, old.end, dict(old.next)))
        while state >= 0 and states[state].next.get(token) == target:
            states[state].next[token] = clone
            state = states[state].link
        old.link = clone
        return clone

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of another text, after one more token, that occurs here.

        Args:
            state: State of that text's longest suffix that occurs here; 0 for none.
            length: Tokens of that suffix.
            token: The text's next one.

        Returns:
            The same two for the text with `token`.
        """
        states = self._states
        while state > 0 and token not in states[state].next:
            state = states[state].link
            length = states[state].length
        found = states[state].next.get(token)
        return (0, 0) if found is None else (found, length + 1)

    def after(self, state: int, limit: int) -> list[int]:
        """Tokens that follow a place of a state, at most `limit`."""
        start = self._states[state].end
        return self.tokens[start : start + limit]


class Corpus:
    """Answers of earlier requests with one cache salt, the newest ones, searched together.

    Args:
        capacity: Tokens at which the older half is dropped.

    Attributes:
        automaton: Automaton of all answers; another object once some were dropped.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: deque[Sequence[int]] = deque()
        self.automaton = SuffixAutomaton()

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer, at most half the capacity of it."""
        self._answers.append((*answer[: self._capacity // 2], _SEPARATOR))
        num_tokens = len(self.automaton.tokens) + len(self._answers[-1])
        if num_tokens > self._capacity:
            while num_tokens > self._capacity // 2 and len(self._answers) > 1:
                num_tokens -= len(self._answers.popleft())
            self.automaton = SuffixAutomaton()
            kept: Iterable[Sequence[int]] = self._answers
        else:
            kept = (self._answers[-1],)
        for token in chain.from_iterable(kept):
            self.automaton.append(token)


class SuffixProposer:
    """Implements `Proposer`: the longest suffix that occurred before, in the request or a corpus.

    After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), with a suffix automaton in place of
    suffix trees and the latest place in place of the most frequent one.

    Args:
        shortest: Tokens that must repeat before anything is drafted.
        corpus: Earlier answers; None for the request's own tokens alone.
    """

    name = "suffix"
    is_model = False

    def __init__(self, shortest: int, corpus: Corpus | None = None) -> None:
        self._shortest = shortest
        self._corpus = corpus
        self._restart()

    def _restart(self) -> None:
        self._own = SuffixAutomaton()
        self._searched: SuffixAutomaton | None = None
        self._match = 0, 0  # in the corpus: see `SuffixAutomaton.advance`

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        self._follow(history)
        length, end = self._own.repeated
        state, elsewhere = self._match
        if max(length, elsewhere) < self._shortest:
            return NO_DRAFT
        if length >= elsewhere or self._searched is None:
            return Draft(repeat(self._own.tokens, end, limit), length)
        found = self._searched.after(state, limit)
        return Draft(found[: found.index(_SEPARATOR)] if _SEPARATOR in found else found, elsewhere)

    def _follow(self, history: Sequence[int]) -> None:
        known = self._own.tokens
        if known and (len(history) < len(known) or history[len(known) - 1] != known[-1]):
            self._restart()
            known = self._own.tokens
        new = history[len(known) :]
        for token in new:
            self._own.append(token)
        if self._corpus is None:
            return
        if self._searched is not self._corpus.automaton:
            self._searched, self._match = self._corpus.automaton, (0, 0)
            new = history[-_MOST_SEARCHED:]
        for token in new:
            self._match = self._searched.advance(*self._match, token)
