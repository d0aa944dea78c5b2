"""Drafts from a prediction: a text of the request's that much of its answer is likely to be."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft
from worker.engines.prediction import FollowedPrediction


class PredictionProposer:
    """Implements `Proposer`: what comes next in a prediction through which the answer is followed.

    Args:
        prediction: Token ids.
        start: Number of tokens of the history before the answer.
    """

    name = "prediction"
    is_model = False

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        self._followed = FollowedPrediction(prediction)
        self._start = start

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        place, tokens = self._followed.follow(history, self._start), self._followed.tokens
        following = tokens[place.following : place.following + limit]
        return NO_DRAFT if place.is_lost else Draft(following, place.matched)
