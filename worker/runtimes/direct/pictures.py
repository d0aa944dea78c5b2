"""Pictures of a chat: parts of its messages, which the chat template shows as places."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.engines.images import FIELD
from worker.errors import InvalidRequest, shown

PART = "image_url"
"""Type of a message's part that is a picture, and the key of its URL."""

_PLACE = {"type": "image"}
"""A picture's part as chat templates know it."""

_DETAILS = (None, "auto")
_IN_FIELD = re.compile(rf"{FIELD}(?:\.{PART}(?:\[(\d+)\](?:\.Url)?)?)?")


def taken_out(messages: Any) -> tuple[Any, list[str]]:
    """The messages with places for their pictures, and the pictures' URLs in order.

    Args:
        messages: Messages of a chat, checked or not: what is no list of parts stays as it is.

    Raises:
        InvalidRequest: a picture's part is malformed.
    """
    urls: list[str] = []
    if not isinstance(messages, list):
        return messages, urls
    return [_without(f"messages[{i}]", each, urls) for i, each in enumerate(messages)], urls


def _without(path: str, message: Any, urls: list[str]) -> Any:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not any(is_picture(part) for part in parts):
        return message
    places = []
    for i, part in enumerate(parts):
        if is_picture(part):
            urls.append(picture_url(f"{path}.content[{i}]", part))
        places.append(_PLACE if is_picture(part) else part)
    return {**message, "content": places}


def is_picture(part: Any) -> bool:
    """Whether a message's part says that it is a picture."""
    return isinstance(part, Mapping) and part.get("type") == PART


def picture_url(path: str, part: Mapping[str, Any]) -> str:
    """The URL of a picture's part.

    Args:
        path: JSON path of the part.
        part: ``{"type": "image_url", "image_url": {"url": ...}}``.

    Raises:
        InvalidRequest: it is malformed, or asks for a detail that only a service of OpenAI has.
    """
    image = part.get(PART)
    unknown = sorted({*part} - {"type", PART, "prompt_cache_breakpoint"})
    if unknown:
        raise InvalidRequest(f"{path}.{unknown[0]}", "unknown in a part of this type")
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        raise InvalidRequest(f"{path}.{PART}", f'must be {{"url": a URL}}, got {shown(image)}')
    for name in sorted({*image} - {"url", "detail"}):
        raise InvalidRequest(f"{path}.{PART}.{name}", "unknown in a picture")
    if image.get("detail") not in _DETAILS:
        problem = f"must be auto: the model's own processor sizes pictures, got {shown(image['detail'])}"
        raise InvalidRequest(f"{path}.{PART}.detail", problem)
    return str(image["url"])


def add_pictures(fields: dict[str, Any], urls: list[str]) -> None:
    """Put the pictures of a chat among the fields of its request.

    Raises:
        InvalidRequest: the field for them is given too.
    """
    if not urls:
        return
    if fields.get(FIELD) is not None:
        raise InvalidRequest(FIELD, "cannot be given beside pictures in the messages; give one of them")
    fields[FIELD] = {PART: [{"Url": url} for url in urls]}


def picture_places(messages: Any) -> list[str]:
    """The paths of the pictures' parts in the messages of a chat, checked or not."""
    found = []
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        parts = message.get("content") if isinstance(message, Mapping) else None
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            if is_picture(part):
                found.append(f"messages[{i}].content[{j}]")
    return found


def told_path(field: str, messages: Any) -> str:
    """The path in a chat for one in `FIELD`, which has the pictures of its messages.

    Args:
        field: The path; it stays as it is where no picture of the messages is meant.
        messages: Messages of the chat.

    Returns:
        Path of the picture's URL, as ``messages[2].content[1].image_url.url``; of the first picture
        for an error about all of them.
    """
    found = _IN_FIELD.fullmatch(field)
    places = [] if found is None else picture_places(messages)
    if found is None or not places:
        return field
    if found[1] is None:
        return places[0]
    return f"{places[int(found[1])]}.{PART}.url" if int(found[1]) < len(places) else field
