"""Token ids of an answer, and log probabilities for a trainer, as data for ``engine_data``.

Dynamo's frontends read and write JSON numbers with a library that may change the last bit of a
float. So the data are one JSON text, which a frontend passes on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from worker.engines import TokenDelta, TokenLogprob
from worker.requests.prompt_scores import LEAST_LOGPROB
from worker.requests.receipts import sampled_ids
from worker.requests.request import GenerationRequest

ROLLOUT = "rollout"
"""Key of the JSON text in ``engine_data``."""

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Key of the prompt's ids, in the first chunk's text alone."""

TOKEN_IDS = "token_ids"
"""Key of the ids that were sampled since the chunk before, with an end token that is not shown."""

TRAIN_KEYS = ("raw", "processed", "log_mass")
"""Keys of the lists beside `TOKEN_IDS`, with a number for each; see `TokenLogprob`."""


class RolloutData:
    """Makes the data of one request's chunks.

    Args:
        request: The request.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._prompt: Sequence[int] | None = request.prompt_token_ids
        self._trains = request.params.logprobs_mode == "train"
        self._is_wanted = request.returns_token_ids or self._trains

    def of(self, delta: TokenDelta) -> dict[str, str]:
        """What ``engine_data`` has of a delta, empty if nothing was asked for."""
        ids = sampled_ids(delta) if self._is_wanted else []
        if not ids:
            return {}
        data: dict[str, Any] = {} if self._prompt is None else {PROMPT_TOKEN_IDS: list(self._prompt)}
        self._prompt = None
        data[TOKEN_IDS] = ids
        if self._trains:
            entries = [*(delta.logprobs or ()), *([] if delta.end_logprobs is None else [delta.end_logprobs])]
            data |= _lists([one[0] for one in entries])
        return {ROLLOUT: json.dumps(data, separators=(",", ":"))}


def _lists(entries: Sequence[TokenLogprob]) -> dict[str, list[float]]:
    columns = ([one.logprob for one in entries], [one.processed for one in entries], [one.log_mass for one in entries])
    return {
        key: [max(LEAST_LOGPROB if value is None else value, LEAST_LOGPROB) for value in column]
        for key, column in zip(TRAIN_KEYS, columns, strict=True)
    }
