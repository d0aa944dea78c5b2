"""States of a suffix automaton, with their links and transitions, as flat arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

NONE = -1
ROOT = 0


class SuffixStates:
    """States of a suffix automaton; state 0 is the root.

    Attributes:
        length: Length of the longest substring of each state.
        link: Link of each state (`adapters.processors.suffixes`), -1 at the root.
        end: Latest end of each state's substrings, 0 if ends are not tracked.
    """

    def __init__(self) -> None:
        self.length, self.link, self.end = array("q", [0]), array("q", [NONE]), array("q", [0])
        # The first transition of each state; the others are in `_more`.
        self._token, self._target = array("q", [NONE]), array("q", [NONE])
        self._more: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self.length)

    def step(self, state: int, token_id: int) -> int:
        """Target of a transition, -1 if there is none."""
        if self._token[state] == token_id:
            return self._target[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token_id, NONE)

    def steps(self, state: int) -> Iterator[tuple[int, int]]:
        """Token and target of every transition of ``state``."""
        if self._token[state] != NONE:
            yield self._token[state], self._target[state]
        more = self._more.get(state)
        if more is not None:
            yield from more.items()

    def num_steps(self, state: int) -> int:
        """Number of transitions of ``state``."""
        more = self._more.get(state)
        return (self._token[state] != NONE) + (0 if more is None else len(more))

    def set(self, state: int, token_id: int, target: int) -> None:
        """Set a transition; a target of -1 removes it."""
        if target == NONE:
            self._unset(state, token_id)
        elif self._token[state] in (NONE, token_id):
            self._token[state], self._target[state] = token_id, target
        else:
            self._more.setdefault(state, {})[token_id] = target

    def _unset(self, state: int, token_id: int) -> None:
        if self._token[state] == token_id:
            self._token[state] = self._target[state] = NONE
        else:
            del self._more[state][token_id]

    def add(self, length: int, end: int) -> int:
        """Number of a new state without transitions, linked to the root."""
        self.length.append(length)
        self.link.append(ROOT)
        self.end.append(end)
        self._token.append(NONE)
        self._target.append(NONE)
        return len(self.length) - 1

    def clone(self, state: int, length: int) -> int:
        """Number of a copy of ``state`` with another length."""
        clone = self.add(length, self.end[state])
        self.link[clone] = self.link[state]
        self._token[clone], self._target[clone] = self._token[state], self._target[state]
        if state in self._more:
            self._more[clone] = dict(self._more[state])
        return clone

    def redirect(
        self, state: int, token_id: int, old: int, new: int, changed: list[tuple[int, int, int]] | None
    ) -> tuple[int, int]:
        """Redirect the token's transitions from ``old`` to ``new``, from ``state`` along the links.

        Args:
            state: First state.
            token_id: The token.
            old: Target of the transitions to redirect, -1 for states without one.
            new: New target.
            changed: Receives state, token and old target of each change, if not None.

        Returns:
            The first state with another transition, and its target; (-1, -1) if there is none.
        """
        tokens, targets, links, branches = self._token, self._target, self.link, self._more
        while state != NONE:
            first = tokens[state]
            if first == token_id:
                target = targets[state]
            else:
                more = branches.get(state)
                target = NONE if more is None else more.get(token_id, NONE)
            if target != old:
                return state, target
            if changed is not None:
                changed.append((state, token_id, old))
            if first in (token_id, NONE):
                tokens[state], targets[state] = token_id, new
            elif more is None:
                branches[state] = {token_id: new}
            else:
                more[token_id] = new
            state = links[state]
        return NONE, NONE

    def cut(self, size: int) -> None:
        """Remove all states but the first ``size``, to which no transition leads any more."""
        for state in range(size, len(self)):
            self._more.pop(state, None)
        for states in (self.length, self.link, self.end, self._token, self._target):
            del states[size:]
