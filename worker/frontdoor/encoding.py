"""JSON of answers, in parts between which the event loop serves other clients: an answer with log
probabilities may have tens of megabytes, which take a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

FEW = 64
"""Items of a long list that are encoded together."""

MOST_DEEP = 5
"""Levels of objects and lists in which long lists are looked for."""

TURN = 64 * 1024
"""Bytes that are encoded, about, before others have their turn."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encoded(content: Any) -> bytes:
    """JSON in UTF-8, without white space."""
    return _ENCODER.encode(content).encode()


async def encoded_in_turns(content: Any) -> bytes:
    """The same, with turns for others while a large content is encoded, which must not change."""
    parts, size = list[bytes](), 0
    for part in json_parts(content):
        parts.append(part.encode())
        size += len(part)
        if size > TURN:
            size = 0
            await asyncio.sleep(0)
    return b"".join(parts)


def json_parts(content: Any, depth: int = 0) -> Iterator[str]:
    """The text of `encoded` in parts, each of `FEW` items of a long list at most.

    Args:
        content: JSON data.
        depth: Levels of objects and lists that it is in.
    """
    if depth > MOST_DEEP:
        yield _ENCODER.encode(content)
    elif isinstance(content, dict):
        separator = "{"
        for key, value in content.items():
            yield f"{separator}{_ENCODER.encode({key: 0})[1:-2]}"
            yield from json_parts(value, depth + 1)
            separator = ","
        yield "}" if content else "{}"
    elif isinstance(content, list) and len(content) > FEW:
        separator = "["
        for start in range(0, len(content), FEW):
            yield f"{separator}{_ENCODER.encode(content[start : start + FEW])[1:-1]}"
            separator = ","
        yield "]"
    elif isinstance(content, list):
        separator = "["
        for value in content:
            yield separator
            yield from json_parts(value, depth + 1)
            separator = ","
        yield "]" if content else "[]"
    else:
        yield _ENCODER.encode(content)
