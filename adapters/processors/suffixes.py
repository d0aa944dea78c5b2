"""Suffix automaton over token ids: appends, rewinds, and the newest repeat.

Online construction of Blumer et al., "The smallest automaton recognizing the subwords of a text"
(1985): a state stands for the substrings with the same set of end positions, its link for the
longest of their suffixes that also ends elsewhere. Appending costs O(1) amortised, in time and in
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from adapters.processors.suffix_states import NONE, ROOT, SuffixStates


class _Undo:
    """Record of one append: the former values of all that it changed."""

    __slots__ = ("active", "ends", "last", "links", "matched", "num_states", "steps")

    def __init__(self, num_states: int, last: int, active: int, matched: int) -> None:
        self.num_states, self.last, self.active, self.matched = num_states, last, active, matched
        self.steps: list[tuple[int, int, int]] = []
        self.links: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []


class SuffixAutomaton:
    """Finds which tokens followed earlier occurrences of the newest tokens.

    Args:
        depth: Longest repeat that is distinguished, in tokens; longer ones count as this long.
        track_ends: Keep the latest end of every repeat, as a window requires.
        num_undoable: Newest tokens that can be rewound.
    """

    def __init__(self, depth: int, *, track_ends: bool = False, num_undoable: int = 256) -> None:
        self.size = 0
        self._depth = depth
        self._track_ends = self._marks_ends = track_ends
        self._states = SuffixStates()
        self._last = ROOT
        # The longest suffix of the text that also occurs earlier, cut to depth + 1 tokens: its
        # state and length.
        self._active, self._matched = ROOT, 0
        self._undo: deque[_Undo] = deque(maxlen=num_undoable)

    def append(self, token_id: int) -> None:
        """Add one token, not negative."""
        undo = _Undo(len(self._states), self._last, self._active, self._matched)
        self._append(token_id, undo)
        self._undo.append(undo)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add many tokens, which cannot be rewound."""
        self._undo.clear()
        self._marks_ends = False  # ends are marked once for all tokens, since a token may have many repeats
        for token_id in token_ids:
            self._append(token_id, None)
        self._marks_ends = self._track_ends
        if self._track_ends:
            self._find_ends()

    def rewind(self, count: int) -> bool:
        """Remove the newest ``count`` tokens; False, and no change, if they cannot be removed."""
        if count > len(self._undo):
            return False
        for _ in range(count):
            self._revert(self._undo.pop())
        return True

    def followers(self, shortest: int) -> Iterator[tuple[int, int, int]]:
        """Tokens that followed an earlier occurrence of the newest ``shortest`` tokens or more.

        Yields:
            ``(token_id, length, end)``: an occurrence of ``length`` tokens (at most ``depth``) that
            ended before index ``end``, the latest such position of the token; ``end`` is 0 unless
            ends are tracked. Longest first. Without ends each token is yielded once; with them
            again for each shorter length with another latest end.

        Iterates over at most ``depth`` lengths, whatever the size of the text.
        """
        states = self._states
        state, matched = self._active, min(self._matched, self._depth)
        if matched < shortest:
            return
        while state != ROOT and states.length[states.link[state]] >= matched:
            state = states.link[state]
        seen: dict[int, int] = {}
        while state != ROOT and matched >= shortest:
            if self._track_ends or states.num_steps(state) != len(seen):
                for token_id, target in states.steps(state):
                    if seen.get(token_id) != states.end[target]:
                        seen[token_id] = states.end[target]
                        yield token_id, matched, states.end[target] - 1 if self._track_ends else 0
            state = states.link[state]
            matched = states.length[state]

    def _append(self, token_id: int, undo: _Undo | None) -> None:
        self._follow(token_id)
        self._grow(token_id, undo)
        while self._active != ROOT and self._states.length[self._states.link[self._active]] >= self._matched:
            self._active = self._states.link[self._active]
        self.size += 1
        if self._marks_ends:
            self._mark_ends(undo)

    def _follow(self, token_id: int) -> None:
        """Extend the newest repeat by one token, before the automaton holds this token."""
        states, active = self._states, self._active
        while active != ROOT and states.step(active, token_id) == NONE:
            active = states.link[active]
            self._matched = states.length[active]
        target = states.step(active, token_id)
        if target == NONE:
            self._active, self._matched = ROOT, 0
            return
        self._active, self._matched = target, min(self._matched + 1, self._depth + 1)

    def _grow(self, token_id: int, undo: _Undo | None) -> None:
        states = self._states
        new = states.add(self.size + 1, self.size + 1 if self._track_ends else 0)
        changed = None if undo is None else undo.steps
        state, target = states.redirect(self._last, token_id, NONE, new, changed)
        self._last = new
        if state == NONE:
            return
        if states.length[state] + 1 == states.length[target]:
            states.link[new] = target
            return
        clone = states.clone(target, states.length[state] + 1)
        states.redirect(state, token_id, target, clone, changed)
        if undo is not None:
            undo.links.append((target, states.link[target]))
        states.link[target] = states.link[new] = clone

    def _mark_ends(self, undo: _Undo | None) -> None:
        """Set the latest end of every suffix that occurred before, up to depth + 1 tokens."""
        states, state = self._states, self._active
        while state != ROOT:
            if undo is not None:
                undo.ends.append((state, states.end[state]))
            states.end[state] = self.size
            state = states.link[state]

    def _find_ends(self) -> None:
        """Compute the latest end of every state at once: its own, or its children's latest."""
        ends, links = self._states.end, self._states.link
        lengths = np.frombuffer(self._states.length, dtype=np.int64)
        for state in np.argsort(-lengths).tolist():
            if links[state] > ROOT and ends[links[state]] < ends[state]:
                ends[links[state]] = ends[state]

    def _revert(self, undo: _Undo) -> None:
        states = self._states
        self.size -= 1
        for state, end in undo.ends:
            states.end[state] = end
        for target, link in undo.links:
            states.link[target] = link
        for state, token_id, target in reversed(undo.steps):
            states.set(state, token_id, target)
        states.cut(undo.num_states)
        self._last, self._active, self._matched = undo.last, undo.active, undo.matched
