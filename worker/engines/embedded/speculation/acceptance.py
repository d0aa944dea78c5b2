"""Acceptance rates of drafted tokens: learnt of a proposer, and of each request's drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

_REQUEST_MEMORY, _PROPOSER_MEMORY = 0.9, 0.99
"""Weight of what was counted before a draft, against that draft."""

_PRIOR_TOKENS = 3.0
"""Tokens of a request's own after which they count as much as what is known of its proposer."""

_PROBE_AFTER, _MOST_PATIENCE = 32, 1024
"""Steps without a draft after which one token is drafted all the same, to see whether it pays:
twice as many after each draft of which nothing was accepted, up to the second number.
"""


@dataclass(slots=True)
class Tally:
    """Decaying counts of drafted tokens.

    Attributes:
        accepted: Accepted tokens.
        tried: Tokens that were compared with a sampled one: tokens behind the first rejected one
            were not.
    """

    accepted: float = 0.0
    tried: float = 0.0

    def count(self, num_drafted: int, num_accepted: int, memory: float) -> None:
        """Take the result of a draft."""
        self.accepted = memory * self.accepted + num_accepted
        self.tried = memory * self.tried + min(num_drafted, num_accepted + 1)


@dataclass(slots=True)
class ProposerAcceptance:
    """The acceptance of all drafts of a proposer.

    It is counted by how many tokens of the history a draft rests on: what follows a repetition of
    two tokens is a guess, what follows one of twenty is a copy.

    Attributes:
        expected: The rate before anything is known, between 0 and 1.
    """

    expected: float
    _tallies: dict[int, Tally] = field(default_factory=dict)

    def rate(self, matched: int) -> float:
        """Probability that a drafted token is accepted where those before it were."""
        return self._tally(matched).accepted / self._tally(matched).tried

    def count(self, matched: int, num_drafted: int, num_accepted: int) -> None:
        """Take the result of a draft."""
        self._tally(matched).count(num_drafted, num_accepted, _PROPOSER_MEMORY)

    def _tally(self, matched: int) -> Tally:
        key = matched.bit_length()
        if key not in self._tallies:
            self._tallies[key] = Tally(_PRIOR_TOKENS * self.expected, _PRIOR_TOKENS)
        return self._tallies[key]


class Acceptance:
    """The acceptance of one request's drafts, which begins as that of its proposer.

    Args:
        proposer: Acceptance of all requests' drafts.

    Attributes:
        num_idle: Steps since the last draft.
    """

    def __init__(self, proposer: ProposerAcceptance) -> None:
        self.num_idle = 0
        self._patience = _PROBE_AFTER
        self._proposer = proposer
        self._tallies: dict[int, Tally] = {}

    def rate(self, matched: int) -> float:
        """Probability that a drafted token is accepted where those before it were."""
        own = self._tallies.get(matched.bit_length()) or Tally()
        return (own.accepted + _PRIOR_TOKENS * self._proposer.rate(matched)) / (own.tried + _PRIOR_TOKENS)

    def count(self, matched: int, num_drafted: int, num_accepted: int) -> None:
        """Take the result of a draft."""
        self.num_idle = 0
        self._patience = _PROBE_AFTER if num_accepted else min(2 * self._patience, _MOST_PATIENCE)
        tally = self._tallies.setdefault(matched.bit_length(), Tally())
        tally.count(num_drafted, num_accepted, _REQUEST_MEMORY)
        self._proposer.count(matched, num_drafted, num_accepted)

    @property
    def wants_probe(self) -> bool:
        """Whether nothing has been drafted for so long that it should be tried."""
        return self.num_idle > self._patience
