"""The message that `worker.runtimes.direct` serves → the ``GenerateRequest`` that asks a worker for
it: the inverse of `worker.runtimes.openengine.request`, by the same table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from worker.errors import InvalidRequest, path_within
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import Unsupported
from worker.runtimes.openengine.media import media, own_media
from worker.runtimes.openengine.request import FIELDS, TOLD

_GUIDES = tuple(path for path in FIELDS if path.startswith("guided.") and path != "guided.backend")
_SCORES = {
    "response.output_candidates": ("return_output_logprobs", "output_candidates"),
    "response.prompt_candidates": ("return_prompt_logprobs", "prompt_candidates"),
}
_JSON_TEXT = ("guided.json_schema", "guided.structural_tag", "extra.logits_processors")
"""Fields that carry JSON data as text, in which integers keep every digit."""


def written(message: Mapping[str, Any], request_id: str) -> wire.GenerateRequest:
    """The request that a message becomes; `request.read` makes the message of it again.

    A negative seed is the one that it is taken for, modulo 2^64.

    Args:
        message: The fields of docs/request.md, one choice; null is unset.
        request_id: Id of the request.

    Raises:
        InvalidRequest: a value has another type than the protocol's field, or is out of its range.
        Unsupported: the protocol has no field for one that is set.
    """
    left = copied(message)
    request = wire.GenerateRequest(request_id=request_id)
    for theirs, ours in FIELDS.items():
        value = _take(left, ours)
        if value is None:
            continue
        if theirs == "media":
            request.media.extend(media(value))
            continue
        if theirs in _JSON_TEXT and not isinstance(value, str):
            value = json.dumps(value, separators=(",", ":"))
        try:
            _set(request, theirs, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(ours, f"is no value of the protocol's field {theirs}: {error}") from None
    _add_conditions(request, left)
    for path in _paths(left):
        raise Unsupported(path, "OpenEngine has no field for it")
    return request


def copied(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose objects are its own, and whose lists, which may be long, are the same."""
    return {name: copied(value) if isinstance(value, Mapping) else value for name, value in message.items()}


def own_name(field: str, message: Mapping[str, Any]) -> str:
    """The field of a message that a worker's error names by the protocol's name.

    Args:
        field: Name in the error.
        message: The message that the request was made of; of fields that become the same one of the
            protocol, the one that it has is meant.
    """
    if field.startswith("guided."):
        return "sampling_options.guided_decoding"
    if path_within(field, "media") is not None:
        return own_media(field)
    found = [ours + rest for ours, theirs in TOLD if (rest := path_within(field, theirs)) is not None]
    left = copied(message)
    return next((ours for ours in found if _take(left, ours) is not None), found[0] if found else field)


def _set(request: wire.GenerateRequest, path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    if not name:
        setattr(request, section, value)
    elif path == "token_ids.ids":
        request.token_ids.ids.extend(value)
    elif path in _SCORES:
        returns, candidates = _SCORES[path]
        setattr(request.response, returns, True)
        if value:
            getattr(request.response, candidates).top_n = value
    elif path == "guided.choice":
        request.guided.choice.choices.extend(value)
    elif section == "extra":
        request.extra.update({name: value})
    else:
        setattr(getattr(request, section), name, value + 2**64 if name == "seed" and value < 0 else value)


def _add_conditions(request: wire.GenerateRequest, left: dict[str, Any]) -> None:
    kinds = (("stop_text", "stop_conditions.stop"), ("stop_token_id", "stop_conditions.stop_token_ids"))
    for kind, ours in kinds:
        for value in _take(left, ours) or ():
            try:
                request.stopping.conditions.add(**{kind: value})
            except (TypeError, ValueError) as error:
                raise InvalidRequest(
                    ours, f"is no value of the protocol's field stopping.conditions: {error}"
                ) from None


def _take(message: dict[str, Any], path: str) -> Any:
    """A field of the message, which then is without it; None if it is not set."""
    section, _, rest = path.partition(".")
    if not rest:
        return message.pop(section, None)
    inner = message.get(section)
    return _take(inner, rest) if isinstance(inner, dict) else None


def _paths(left: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The paths of the fields that are set."""
    found = []
    for name, value in left.items():
        if isinstance(value, Mapping):
            found += _paths(value, f"{prefix}{name}.")
        elif value is not None:
            found.append(prefix + name)
    return found
