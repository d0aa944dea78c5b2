"""Token ids of an answer, and log probabilities for a trainer, as data for ``engine_data``.

Dynamo's frontends read and write JSON numbers with a library that may change the last bit of a
float. So the data are one JSON text, which a frontend passes on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from worker.engines import LEAST_LOGPROB, TokenDelta, TokenLogprob
from worker.requests.request import GenerationRequest

ROLLOUT = "rollout"
"""Key of the JSON text in ``engine_data``."""

MATCHED = "matched"
"""Key of the stop string or token id that ended the answer, in ``engine_data`` beside it."""

ABORT = "abort"
"""Key beside it, in the last chunk of an answer that was cut off: true. A frontend that knows no
such reason shows another one.
"""

CUT_OFF = ("abort", "cancelled")
"""Reasons for the end of an answer that is not complete: a pause, or its cancellation by id."""

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Key of the prompt's ids, in the first chunk's text alone."""

TOKEN_IDS = "token_ids"
"""Key of the ids that were sampled since the chunk before, with an end token that is not shown."""

TRAIN_KEYS = ("raw", "tempered", "processed", "log_mass")
"""Keys of the lists beside `TOKEN_IDS`, with a number for each; see `TokenLogprob`."""

RANK = "rank"
"""Key of a list beside them: the rank of each token in the model's own distribution, from 1."""

TOP = "top"
"""Key of a list beside them, if alternatives were asked for: of each token the most likely ones,
as pairs of an id and its raw log probability.
"""


class RolloutData:
    """Makes the data of one request's chunks.

    Args:
        request: The request.

    Attributes:
        is_wanted: Whether its client asks for them.
    """

    def __init__(self, request: GenerationRequest) -> None:
        # of a migrated request it came with the first tokens
        self._prompt: Sequence[int] | None = None if request.generated_token_ids else request.prompt_token_ids
        self._trains = request.params.logprobs_mode == "train"
        self._has_alternatives = bool(request.params.logprobs)
        self.is_wanted = request.returns_token_ids or self._trains

    def of(self, delta: TokenDelta) -> dict[str, str]:
        """Entries of ``engine_data`` for a delta, empty if nothing was asked for.

        The end of an answer without a token has them, too: it was aborted, or its deadline came.
        """
        ids = delta.sampled_ids if self.is_wanted else []
        if not ids and (not self.is_wanted or delta.finish_reason is None or self._prompt is None):
            return {}
        data: dict[str, Any] = {} if self._prompt is None else {PROMPT_TOKEN_IDS: list(self._prompt)}
        self._prompt = None
        data[TOKEN_IDS] = ids
        if self._trains:
            entries = [*(delta.logprobs or ()), *([] if delta.end_logprobs is None else [delta.end_logprobs])]
            data |= _lists([one[0] for one in entries]) | {RANK: [one[0].rank for one in entries]}
            if self._has_alternatives:
                data[TOP] = [[[one.token_id, _number(one.logprob)] for one in position[1:]] for position in entries]
        return {ROLLOUT: json.dumps(data, separators=(",", ":"))}


class HeldData:
    """The data of tokens that are held back."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._lists

    def add(self, text: str) -> None:
        """Add the data of the next tokens."""
        for key, values in json.loads(text).items():
            self._lists.setdefault(key, []).extend(values)

    def take(self, count: int | None) -> str | None:
        """The data of the first `count` tokens, of all of them for None, which are not held back
        any more; None if there are no data of them.
        """
        if self.is_empty or count == 0:
            return None
        taken = {key: values if key == PROMPT_TOKEN_IDS else values[:count] for key, values in self._lists.items()}
        left = {key: values[len(taken[key]) :] for key, values in self._lists.items() if key != PROMPT_TOKEN_IDS}
        self._lists = left if left[TOKEN_IDS] else {}
        return json.dumps(taken, separators=(",", ":"))


def add_match(chunk: dict[str, Any], match: int | str) -> None:
    """Put the token or the stop string that ended the answer beside the data of a chunk."""
    if ROLLOUT in chunk.get("engine_data", {}):
        chunk["engine_data"][MATCHED] = match


def _lists(entries: Sequence[TokenLogprob]) -> dict[str, list[float]]:
    columns: tuple[list[float | None], ...] = (
        [one.logprob for one in entries],
        [one.tempered for one in entries],
        [one.processed for one in entries],
        [one.log_mass for one in entries],
    )
    return {key: [_number(value) for value in column] for key, column in zip(TRAIN_KEYS, columns, strict=True)}


def _number(value: float | None) -> float:
    """A number that JSON has, where a float may be minus infinity."""
    return LEAST_LOGPROB if value is None or value < LEAST_LOGPROB else value
