"""Requests as the front door sends them on, made of the bytes of a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.catalog import Catalog
from worker.frontdoor.requests import parsed, rewritten_fields
from worker.frontdoor.tools import ToolCallSettings


def rewritten(
    path: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    catalog: Catalog,
    calls: ToolCallSettings | None = None,
    **options: Any,
) -> tuple[bytes, ...]:
    """The bodies that `rewritten_fields` makes of ``body``, with its options. Raises `Refused`."""
    return rewritten_fields(path, parsed(body), headers, catalog, calls, body, **options)
