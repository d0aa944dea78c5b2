"""Suffix automaton over token ids: appends, removals at the end, and the newest repeat.

Online construction of Blumer et al., "The smallest automaton recognizing the subwords of a text"
(1985): a state stands for the substrings with the same set of end positions, its link for the
longest of their suffixes that also ends elsewhere. Appending costs O(1) amortised, in time and in
memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

_NONE = -1
_ROOT = 0


class _Undo:
    """What one append changed: the state before it."""

    __slots__ = ("active", "last", "links", "matched", "num_states", "seen", "steps")

    def __init__(self, num_states: int, last: int, active: int, matched: int) -> None:
        self.num_states, self.last, self.active, self.matched = num_states, last, active, matched
        self.steps: list[tuple[int, int, int]] = []
        self.links: list[tuple[int, int]] = []
        self.seen: list[tuple[int, int]] = []


class SuffixAutomaton:
    """Finds which tokens followed earlier occurrences of the newest tokens.

    Args:
        depth: Longest repeat that is distinguished, in tokens; longer ones count as this long.
        track_ends: Keep the latest end of every repeat, as a window requires.
        num_undoable: Appends that can be undone.
    """

    def __init__(self, depth: int, *, track_ends: bool = False, num_undoable: int = 256) -> None:
        self.size = 0
        self._depth = depth
        self._track_ends = self._marks_ends = track_ends
        # State i: length of its longest substring, its link, its first transition; the others are
        # in `_more`.
        self._length, self._link = array("q", [0]), array("q", [_NONE])
        self._token, self._target = array("q", [_NONE]), array("q", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._end = array("q", [0])
        self._last = _ROOT
        # The longest suffix of the text that also occurs earlier, cut to depth + 1 tokens: its
        # state and length.
        self._active, self._matched = _ROOT, 0
        self._undo: deque[_Undo] = deque(maxlen=num_undoable)

    def append(self, token_id: int) -> None:
        """Add one token, not negative."""
        undo = _Undo(len(self._length), self._last, self._active, self._matched)
        self._append(token_id, undo)
        self._undo.append(undo)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add many tokens, which cannot be undone."""
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
        state, matched = self._active, min(self._matched, self._depth)
        if matched < shortest:
            return
        while state != _ROOT and self._length[self._link[state]] >= matched:
            state = self._link[state]
        seen: dict[int, int] = {}
        while state != _ROOT and matched >= shortest:
            if self._track_ends or self._num_steps(state) != len(seen):
                for token_id, target in self._steps(state):
                    if seen.get(token_id) != self._end[target]:
                        seen[token_id] = self._end[target]
                        yield token_id, matched, self._end[target] - 1 if self._track_ends else 0
            state = self._link[state]
            matched = self._length[state]

    # States

    def _step(self, state: int, token_id: int) -> int:
        if self._token[state] == token_id:
            return self._target[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token_id, _NONE)

    def _set(self, state: int, token_id: int, target: int) -> None:
        if self._token[state] in (_NONE, token_id):
            self._token[state], self._target[state] = token_id, target
        else:
            self._more.setdefault(state, {})[token_id] = target

    def _steps(self, state: int) -> Iterator[tuple[int, int]]:
        if self._token[state] != _NONE:
            yield self._token[state], self._target[state]
        more = self._more.get(state)
        if more is not None:
            yield from more.items()

    def _num_steps(self, state: int) -> int:
        more = self._more.get(state)
        return (self._token[state] != _NONE) + (0 if more is None else len(more))

    def _new(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_ROOT)
        self._token.append(_NONE)
        self._target.append(_NONE)
        self._end.append(self.size + 1 if self._track_ends else 0)
        return len(self._length) - 1

    # Appending

    def _append(self, token_id: int, undo: _Undo | None) -> None:
        self._follow(token_id)
        self._grow(token_id, undo)
        while self._active != _ROOT and self._length[self._link[self._active]] >= self._matched:
            self._active = self._link[self._active]
        self.size += 1
        if self._marks_ends:
            self._mark_ends(undo)

    def _follow(self, token_id: int) -> None:
        """Extend the newest repeat by one token, before the automaton holds this token."""
        active = self._active
        while active != _ROOT and self._step(active, token_id) == _NONE:
            active = self._link[active]
            self._matched = self._length[active]
        target = self._step(active, token_id)
        if target == _NONE:
            self._active, self._matched = _ROOT, 0
            return
        self._active, self._matched = target, min(self._matched + 1, self._depth + 1)

    def _grow(self, token_id: int, undo: _Undo | None) -> None:
        new = self._new(self.size + 1)
        state, target = self._lead(self._last, token_id, _NONE, new, undo)
        self._last = new
        if state == _NONE:
            return
        if self._length[state] + 1 == self._length[target]:
            self._link[new] = target
            return
        clone = self._clone(target, self._length[state] + 1)
        self._lead(state, token_id, target, clone, undo)
        if undo is not None:
            undo.links.append((target, self._link[target]))
        self._link[target] = self._link[new] = clone

    def _lead(self, state: int, token_id: int, old: int, new: int, undo: _Undo | None) -> tuple[int, int]:
        """Redirect the token's transitions from ``old`` to ``new``, from ``state`` along the links.

        Returns:
            The first state with another transition, and its target; (-1, -1) if there is none.
        """
        tokens, targets, links, branches = self._token, self._target, self._link, self._more
        while state != _NONE:
            first = tokens[state]
            if first == token_id:
                target = targets[state]
            else:
                more = branches.get(state)
                target = _NONE if more is None else more.get(token_id, _NONE)
            if target != old:
                return state, target
            if undo is not None:
                undo.steps.append((state, token_id, old))
            if first in (token_id, _NONE):
                tokens[state], targets[state] = token_id, new
            elif more is None:
                branches[state] = {token_id: new}
            else:
                more[token_id] = new
            state = links[state]
        return _NONE, _NONE

    def _clone(self, target: int, length: int) -> int:
        clone = self._new(length)
        self._link[clone] = self._link[target]
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        self._end[clone] = self._end[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
        return clone

    def _mark_ends(self, undo: _Undo | None) -> None:
        """Set the latest end of every suffix that occurred before, up to depth + 1 tokens."""
        state = self._active
        while state != _ROOT:
            if undo is not None:
                undo.seen.append((state, self._end[state]))
            self._end[state] = self.size
            state = self._link[state]

    def _find_ends(self) -> None:
        """Compute the latest end of every state at once: its own, or its children's latest."""
        ends, links = self._end, self._link
        lengths = np.frombuffer(self._length, dtype=np.int64)
        for state in np.argsort(-lengths).tolist():
            if links[state] > _ROOT and ends[links[state]] < ends[state]:
                ends[links[state]] = ends[state]

    # Undoing

    def _revert(self, undo: _Undo) -> None:
        self.size -= 1
        for state, end in undo.seen:
            self._end[state] = end
        for target, link in undo.links:
            self._link[target] = link
        for state, token_id, target in reversed(undo.steps):
            if target == _NONE:
                self._unset(state, token_id)
            else:
                self._set(state, token_id, target)
        for state in range(undo.num_states, len(self._length)):
            self._more.pop(state, None)
        for states in (self._length, self._link, self._token, self._target, self._end):
            del states[undo.num_states :]
        self._last, self._active, self._matched = undo.last, undo.active, undo.matched

    def _unset(self, state: int, token_id: int) -> None:
        if self._token[state] == token_id:
            self._token[state] = self._target[state] = _NONE
        else:
            del self._more[state][token_id]
