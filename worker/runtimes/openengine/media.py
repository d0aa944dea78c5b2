"""Pictures: items of the protocol's ``media``, and the worker's ``multi_modal_data``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from worker.engines.images import ANY_PICTURE, FIELD, data_url
from worker.errors import InvalidRequest, shown
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import Unsupported

_KEY = "image_url"
_THEIRS = re.compile(r"media\[(\d+)\](?:\.\w+)?")
_OURS = re.compile(rf"\.{_KEY}\[(\d+)\](?:\.Url)?")
_SOURCES = ("url", "data_uri", "raw_bytes")
_TYPE = re.compile(r"[\w.+-]+/[\w.+*-]+")


def pictures(items: Iterable[wire.MediaItem]) -> dict[str, Any] | None:
    """The field of docs/request.md for the items, None if there are none.

    Each is in the place of one token of the prompt. A ``uuid`` names a picture for caches; here the
    picture itself does.

    Raises:
        InvalidRequest: an item has no source, or a malformed one.
        Unsupported: an item is no picture.
    """
    found = [{"Url": _url(f"media[{place}]", item)} for place, item in enumerate(items)]
    return {_KEY: found} if found else None


def _url(path: str, item: wire.MediaItem) -> str:
    if item.modality != wire.MODALITY_IMAGE:
        raise Unsupported(f"{path}.modality", "must be MODALITY_IMAGE: pictures are served, and no other media")
    source = item.WhichOneof("source")
    if source is None:
        raise InvalidRequest(path, f"must have one of {', '.join(_SOURCES)}")
    if source == "data_uri" and not item.data_uri.startswith("data:"):
        raise InvalidRequest(f"{path}.data_uri", f"must begin with data:, got {shown(item.data_uri)}")
    if source != "raw_bytes":
        return item.url if source == "url" else item.data_uri
    kind = item.mime_type or ANY_PICTURE
    if not _TYPE.fullmatch(kind):
        raise InvalidRequest(f"{path}.mime_type", f"must be a type of media, got {shown(kind)}")
    return data_url(item.raw_bytes, kind)


def media(value: Any) -> list[wire.MediaItem]:
    """The items for the field of docs/request.md; the inverse of `pictures`.

    Raises:
        InvalidRequest: the field is malformed, or has other media.
    """
    items = value.get(_KEY) if isinstance(value, Mapping) and {*value} <= {_KEY} else None
    if not isinstance(items, list):
        raise InvalidRequest(FIELD, f"must hold pictures ({_KEY}) and nothing else")
    return [_item(f"{FIELD}.{_KEY}[{place}]", each) for place, each in enumerate(items)]


def _item(path: str, value: Any) -> wire.MediaItem:
    url = value.get("Url") if isinstance(value, Mapping) and {*value} == {"Url"} else None
    if not isinstance(url, str):
        raise InvalidRequest(path, f'must be {{"Url": a URL}}, got {shown(value)}')
    try:
        if url.startswith("data:"):
            return wire.MediaItem(modality=wire.MODALITY_IMAGE, data_uri=url)
        return wire.MediaItem(modality=wire.MODALITY_IMAGE, url=url)
    except ValueError as error:  # a lone surrogate
        raise InvalidRequest(f"{path}.Url", f"is no text: {error}") from None


def told_media(rest: str) -> str:
    """The protocol's name for a path within ``multi_modal_data``."""
    found = _OURS.match(rest)
    return "media" if found is None else f"media[{found[1]}]"


def own_media(field: str) -> str:
    """The path within ``multi_modal_data`` for one within the protocol's ``media``."""
    found = _THEIRS.match(field)
    return FIELD if found is None else f"{FIELD}.{_KEY}[{found[1]}].Url"
