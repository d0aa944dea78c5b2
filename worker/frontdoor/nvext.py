"""Additions to a request's ``nvext``, Dynamo's own fields, of which a malformed one stays as it is;
and what is taken out of that of an answer.
"""

from __future__ import annotations

from typing import Any

from worker.errors import InvalidRequest
from worker.frontdoor.errors import FieldRefused
from worker.requests.fields import client_annotations


def annotations_of(nvext: Any) -> tuple[str, ...]:
    """The annotations of ``nvext``. Raises `FieldRefused` for one that is refused."""
    given = nvext.get("annotations") if isinstance(nvext, dict) else None
    if given is None:
        return ()
    try:
        return client_annotations("nvext.annotations", given)
    except InvalidRequest as error:
        raise FieldRefused(error.field, error.problem) from None


def with_engine_data(nvext: Any) -> Any:
    """``nvext`` that asks for the worker's data."""
    return _with_entries(nvext, "extra_fields", "engine_data")


def with_annotations(nvext: Any, *annotations: str) -> Any:
    """``nvext`` with further annotations."""
    return _with_entries(nvext, "annotations", *annotations)


def taken_entries(chunk: dict[str, Any], *keys: str) -> list[Any]:
    """Values of ``engine_data`` in a chunk, which then is without them; None for each that is not
    there.
    """
    nvext = chunk.get("nvext") or {}
    data = nvext.get("engine_data") or {}
    values = [data.pop(key, None) for key in keys]
    if "engine_data" in nvext and not data:
        del nvext["engine_data"]
    if "nvext" in chunk and not nvext:
        del chunk["nvext"]
    return values


def _with_entries(nvext: Any, key: str, *entries: str) -> Any:
    given = (nvext or {}).get(key) if isinstance(nvext, dict | None) else 0
    if not isinstance(given, list | None):
        return nvext
    return {**(nvext or {}), key: [*(given or ()), *(each for each in entries if each not in (given or ()))]}
