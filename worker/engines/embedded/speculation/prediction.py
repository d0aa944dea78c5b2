"""Drafts from a prediction: a text of the request's that much of its answer is likely to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft


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
        self._restart()

    def _restart(self) -> None:
        self._num_followed = self._start
        self._place = 0  # in the prediction: the token that comes next, or came next where they parted
        self._matched = 0
        self._is_lost = False

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        if len(history) < self._num_followed:
            self._restart()
        for index in range(self._num_followed, len(history)):
            self._follow(history, index)
        self._num_followed = len(history)
        if self._is_lost:
            return NO_DRAFT
        return Draft(self._tokens[self._place : self._place + limit].tolist(), self._matched)

    def _follow(self, history: Sequence[int], index: int) -> None:
        if not self._is_lost and self._place < len(self._tokens) and self._tokens[self._place] == history[index]:
            self._place += 1
            self._matched += 1
            return
        self._is_lost = True
        if index == self._start:
            return
        earlier, later = self._tokens[:-1] == history[index - 1], self._tokens[1:] == history[index]
        found = np.flatnonzero(earlier & later)
        if found.size:
            next_found = int(np.searchsorted(found, self._place))
            self._place = int(found[next_found % found.size]) + 2
            self._matched, self._is_lost = 2, False
