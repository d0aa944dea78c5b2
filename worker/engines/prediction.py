"""An answer followed through its prediction: a text of the request's that much of it is likely to
be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class Place(NamedTuple):
    """A place in a prediction.

    Attributes:
        following: Index of the token that comes next, or came next where they parted.
        matched: Tokens of the answer before it that equal those of the prediction.
        is_lost: Whether answer and prediction have parted.
        foreseen: Tokens of the whole answer that were the ones to come next.
    """

    following: int
    matched: int
    is_lost: bool
    foreseen: int


class FollowedPrediction:
    """An answer is followed through a prediction from its beginning.

    Where the two part, as in an edited text, nothing is foreseen until two tokens of the answer in
    a row occur in the prediction: then it goes on behind the first such place that follows where
    they parted, or the first of all.

    Args:
        prediction: Token ids.

    Attributes:
        tokens: The same.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.tokens = list(prediction)
        self._places = [Place(0, 0, is_lost=False, foreseen=0)]  # after 0, 1, ... tokens of the answer

    def follow(self, history: Sequence[int], start: int = 0) -> Place:
        """The place behind an answer that has become longer, or was cut off, and whose last token
        may then be another one.

        Args:
            history: Tokens before the answer, and the answer.
            start: Number of tokens before it.
        """
        num_answered = len(history) - start
        if num_answered < len(self._places) - 1:
            del self._places[max(1, num_answered) :]
        for index in range(start + len(self._places) - 1, len(history)):
            previous = history[index - 1] if index > start else None
            self._places.append(self._next(self._places[-1], previous, history[index]))
        return self._places[-1]

    def _next(self, place: Place, previous: int | None, token: int) -> Place:
        """The place behind `token`, from that before it."""
        following, matched, is_lost, foreseen = place
        if not is_lost and following < len(self.tokens) and self.tokens[following] == token:
            return Place(following + 1, matched + 1, is_lost=False, foreseen=foreseen + 1)
        if previous is not None:
            found = self._pairs.get((previous, token))
            if found is not None:
                first = found[bisect_left(found, following) % len(found)]
                return Place(first + 2, 2, is_lost=False, foreseen=foreseen)
        return Place(following, matched, is_lost=True, foreseen=foreseen)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], list[int]]:
        """Places of each two tokens in a row, rising: a search for each token of an answer that has
        parted from a long prediction would take longer than the token.
        """
        places: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(pairwise(self.tokens)):
            places.setdefault(pair, []).append(place)
        return places
