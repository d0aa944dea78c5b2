"""Blocks of type ``image`` as the pictures of a chat."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from worker.engines.images import data_url
from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import Object
from worker.runtimes.direct.pictures import PART

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
"""Values of ``media_type``: those of Anthropic's API."""

_KEYS = ("type", "source", "cache_control", "transformations")
_SOURCES = {"base64": ("type", "media_type", "data"), "url": ("type", "url")}
"""Types of sources, and their keys."""


def picture_part(path: str, block: Object) -> tuple[str, Object]:
    """The picture of a block.

    Args:
        path: Path of the block.
        block: The block.

    Returns:
        The path of what holds the picture, ``source.data`` or ``source.url``, and the part of a
        chat's message for it.

    Raises:
        FieldRefused: the block is malformed, or names a file of another server.
    """
    values.keys_within(path, block, _KEYS)
    if block.get("transformations") not in (None, {}):
        raise FieldRefused(f"{path}.transformations", "must be empty: the model's own processor sizes pictures")
    path += ".source"
    source = values.object_of(path, block.get("source"))
    kind = source.get("type")
    if kind == "file":
        raise FieldRefused(f"{path}.type", "must be base64 or url; got file: no files of pictures are kept here")
    kind = values.one_of(f"{path}.type", kind, _SOURCES)
    values.keys_within(path, source, _SOURCES[kind])
    if kind == "url":
        return _part(f"{path}.url", values.text(f"{path}.url", source.get("url")))
    media_type = values.one_of(f"{path}.media_type", source.get("media_type"), MEDIA_TYPES)
    return _part(f"{path}.data", data_url(_decoded(f"{path}.data", source.get("data")), media_type))


def _part(path: str, url: str) -> tuple[str, Object]:
    return path, {"type": PART, PART: {"url": url}}


def _decoded(path: str, value: Any) -> bytes:
    try:
        content = base64.b64decode(values.text(path, value), validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
        raise FieldRefused(path, f"must be the picture's file in base64: {error}") from None
    if not content:
        raise FieldRefused(path, "must be the picture's file in base64, got an empty text")
    return content
