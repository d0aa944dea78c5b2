"""Refusals, and failures of answers that have begun, as data of an answer: Dynamo's frontend loses
the messages of most errors of a worker, those of completions and of streams, and passes data on.

A request asks for them with an annotation, as the front door does when it asks again why a request
was refused or failed. Nobody else sees them: a refusal is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.errors import InvalidRequest, RequestFailed, ServingError

WANTS_REFUSAL = "refusal_as_data"
"""Annotation of a request whose refusal is to be data."""

ONLY_CHECKED = "only_checked"
"""Annotation of a request that is prepared, and not given to the engine."""

REFUSAL = "refusal"
"""Key of a refusal in ``engine_data``: ``field``, or null, and ``message``."""


def asks(request: Mapping[str, Any], annotation: str) -> bool:
    """Whether a request from the runtime, which nobody has checked, has an annotation."""
    annotations = request.get("annotations")
    return isinstance(annotations, list | tuple) and annotation in annotations


def refusal_chunk(request: Mapping[str, Any], error: ServingError) -> dict[str, Any] | None:
    """The one chunk of a refused request, or the last one of an answer that failed; None if the
    error is to be raised.
    """
    if not isinstance(error, InvalidRequest | RequestFailed) or not asks(request, WANTS_REFUSAL):
        return None
    field = error.field if isinstance(error, InvalidRequest) else None
    return {**empty_chunk(), "engine_data": {REFUSAL: {"field": field, "message": str(error)}}}


def empty_chunk() -> dict[str, Any]:
    """The one chunk of a request for which nothing is computed."""
    return {"token_ids": [], "index": 0, "finish_reason": "stop"}
