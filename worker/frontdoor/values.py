"""Typed values of a request's JSON, or a refusal that names their path."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from worker.frontdoor.errors import FieldRefused

Object = dict[str, Any]


def text(path: str, value: Any) -> str:
    """``value``, a text. Raises `FieldRefused`."""
    if not isinstance(value, str):
        raise FieldRefused(path, f"must be a text, got {shown(value)}")
    return value


def object_of(path: str, value: Any) -> Object:
    """``value``, an object. Raises `FieldRefused`."""
    if not isinstance(value, dict):
        raise FieldRefused(path, f"must be an object, got {shown(value)}")
    return value


def list_of(path: str, value: Any) -> list[Any]:
    """``value``, a list. Raises `FieldRefused`."""
    if not isinstance(value, list):
        raise FieldRefused(path, f"must be a list, got {shown(value)}")
    return value


def model_name(path: str, value: Any) -> str:
    """``value``, the name of a model. Raises `FieldRefused`."""
    if not isinstance(value, str) or not value:
        raise FieldRefused(path, "must be the name of a model that is served")
    return value


def truth(path: str, value: Any) -> bool:
    """``value``, false if it is null. Raises `FieldRefused`."""
    if value is not None and not isinstance(value, bool):
        raise FieldRefused(path, f"must be true or false, got {shown(value)}")
    return bool(value)


def integer(path: str, value: Any, least: int, most: int | None = None) -> int:
    """``value``, an integer within bounds. Raises `FieldRefused`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise FieldRefused(path, f"must be an integer {bounds}, got {shown(value)}")
    return value


def one_of(path: str, value: Any, known: Collection[str]) -> str:
    """``value``, one of some texts. Raises `FieldRefused`."""
    if not isinstance(value, str) or value not in known:
        raise FieldRefused(path, f"must be one of {', '.join(known)}; got {shown(value)}")
    return value


def object_within(path: str, value: Any, known: Collection[str]) -> Object:
    """``value``, an object with known keys alone. Raises `FieldRefused`."""
    found = object_of(path, value)
    keys_within(path, found, known)
    return found


def keys_within(path: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises `FieldRefused` for a key of an object that has no meaning here, unless it is null."""
    for key, each in value.items():
        if key not in known and each is not None:
            raise FieldRefused(f"{path}.{printable(key)}", f"unknown field; known are {', '.join(known)}")


def metadata(value: Any) -> Object:
    """``metadata`` within the bounds of OpenAI's API. Raises `FieldRefused`."""
    found = object_of("metadata", value)
    if len(found) > 16:
        raise FieldRefused("metadata", f"must have at most 16 pairs, got {len(found)}")
    for key, each in found.items():
        path = f"metadata.{printable(key)}"
        if len(key) > 64:
            raise FieldRefused(path, f"must have a key of at most 64 characters, got {len(key)}")
        if len(text(path, each)) > 512:
            raise FieldRefused(path, f"must have at most 512 characters, got {len(each)}")
    return found


def cache_control(path: str, value: Mapping[str, Any]) -> None:
    """Check the hint for a cache that a block or a tool has. Raises `FieldRefused`."""
    given = value.get("cache_control")
    if given is not None:
        object_of(f"{path}.cache_control", given)


def printable(key: str) -> str:
    """A client's key or value for a message: at most 60 characters of printable ASCII."""
    text = json.dumps(key)[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


def shown(value: Any) -> str:
    """A client's value for a message: at most 60 characters of JSON; its kind if it has parts."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
