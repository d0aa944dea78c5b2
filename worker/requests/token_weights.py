"""The versions of the weights that the tokens of an answer are sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.engines.weights import WeightVersion

WEIGHTS = "weight_versions"
"""Key of the versions in ``engine_data``: a list of ``version`` and ``from_token``, the index in
the answer of the first token that is sampled from it."""


class TokenWeights:
    """The versions of one answer, in the order of its tokens.

    Args:
        binds_all: Whether a processor has a state made of the logits of every token.

    Attributes:
        entries: Index of the first token of each version, rising, and the version; none where
            weights do not change.
    """

    def __init__(self, *, binds_all: bool = False) -> None:
        self._binds_all = binds_all
        self.entries: list[tuple[int, WeightVersion]] = []

    @property
    def are_updated(self) -> bool:
        """Whether a token is sampled from other weights than those that the worker started with."""
        return any(version.number for _, version in self.entries)

    @property
    def digest(self) -> str:
        """`WeightVersion.updated_digest` of the weights that the answer may go on with elsewhere:
        those of its newest token; no worker's where the state of its processors is made of several.
        """
        digests = list(dict.fromkeys(version.updated_digest for _, version in self.entries)) or [""]
        if self._binds_all and len(digests) > 1:
            return "of several: " + ", ".join(one or "the start's" for one in digests[:2])
        return digests[-1]

    def take(self, weights: Sequence[tuple[int, WeightVersion]]) -> None:
        """Add the entries of a delta; see `TokenDelta.weights`."""
        for first, version in weights:
            while self.entries and self.entries[-1][0] >= first:
                self.entries.pop()
            if not self.entries or self.entries[-1][1] != version:
                self.entries.append((first, version))

    def as_json(self, num_tokens: int, *, digests: bool = False) -> list[dict[str, Any]]:
        """JSON data for the first `num_tokens` of the answer.

        Args:
            num_tokens: Tokens of the answer.
            digests: Whether each entry has the digest of the weights, too.
        """
        shown = [entry for index, entry in enumerate(self.entries) if not index or entry[0] < num_tokens]
        return [
            {"version": version.name, "from_token": first, **({"digest": version.digest} if digests else {})}
            for first, version in shown
        ]
