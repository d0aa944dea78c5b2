"""Drafts from a prediction: a text of the request's that much of its answer is likely to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft


class _Place(NamedTuple):
    """A place in the prediction.

    Attributes:
        following: Index of the token that comes next, or came next where they parted.
        matched: Tokens of the answer before it that equal those of the prediction.
        is_lost: Whether answer and prediction have parted.
    """

    following: int
    matched: int
    is_lost: bool


class PredictionProposer:
    """Implements `Proposer`: the answer is followed through the prediction.

    It begins with the prediction's beginning. Where the two part, as in an edited text, nothing is
    drafted until two tokens of the answer in a row occur in the prediction: then it goes on behind
    the first such place that follows where they parted, or the first of all.

    Args:
        prediction: Token ids.
        start: Number of tokens of the history before the answer.
    """

    name = "prediction"
    is_model = False

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        self._tokens = np.asarray(prediction, dtype=np.int64)
        self._start = start
        self._places = [_Place(0, 0, is_lost=False)]  # after 0, 1, ... tokens of the answer

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        num_answered = len(history) - self._start
        if num_answered < len(self._places) - 1:  # it was cut off, and its last token may be another one
            del self._places[max(1, num_answered) :]
        for index in range(self._start + len(self._places) - 1, len(history)):
            self._places.append(self._next(self._places[-1], history, index))
        following, matched, is_lost = self._places[-1]
        return NO_DRAFT if is_lost else Draft(self._tokens[following : following + limit].tolist(), matched)

    def _next(self, place: _Place, history: Sequence[int], index: int) -> _Place:
        """The place behind a token of the history, from that before it."""
        following, matched, is_lost = place
        if not is_lost and following < len(self._tokens) and self._tokens[following] == history[index]:
            return _Place(following + 1, matched + 1, is_lost=False)
        if index > self._start:
            earlier, later = self._tokens[:-1] == history[index - 1], self._tokens[1:] == history[index]
            found = np.flatnonzero(earlier & later)
            if found.size:
                first = int(np.searchsorted(found, following)) % found.size
                return _Place(int(found[first]) + 2, 2, is_lost=False)
        return _Place(following, matched, is_lost=True)
