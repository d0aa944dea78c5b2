"""Additions to ``nvext``, Dynamo's own fields of a request; a malformed one stays as it is."""

from __future__ import annotations

from typing import Any


def with_engine_data(nvext: Any) -> Any:
    """``nvext`` that asks for the worker's data."""
    return _with_entries(nvext, "extra_fields", "engine_data")


def with_annotations(nvext: Any, *annotations: str) -> Any:
    """``nvext`` with further annotations."""
    return _with_entries(nvext, "annotations", *annotations)


def _with_entries(nvext: Any, key: str, *entries: str) -> Any:
    given = (nvext or {}).get(key) if isinstance(nvext, dict | None) else 0
    if not isinstance(given, list | None):
        return nvext
    return {**(nvext or {}), key: [*(given or ()), *(each for each in entries if each not in (given or ()))]}
