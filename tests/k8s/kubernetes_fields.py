"""Checks a document against the Kubernetes API's own types, as the official Python client
declares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes.client as api

_SCALARS: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "object": (str, int)}


def problems(document: Any, kind: str, path: str = "$") -> Iterator[str]:
    """Every place where ``document`` is not a ``kind``, such as ``V1PodTemplateSpec`` or
    ``list[V1Container]``.
    """
    items = re.fullmatch(r"list\[(.+)\]", kind)
    values = re.fullmatch(r"dict\(str, (.+)\)", kind)
    if items or values:
        wanted = list if items else dict
        if not isinstance(document, wanted):
            yield f"{path}: not a {wanted.__name__}"
            return
        inner = (items or values)[1]  # type: ignore[index]
        for key, value in enumerate(document) if items else document.items():  # type: ignore[union-attr]
            yield from problems(value, inner, f"{path}[{key}]")
    elif kind in _SCALARS:
        if not isinstance(document, _SCALARS[kind]) or (kind != "bool" and isinstance(document, bool)):
            yield f"{path}: not a {kind}"
    else:
        yield from _object_problems(document, kind, path)


def _object_problems(document: Any, kind: str, path: str) -> Iterator[str]:
    if not isinstance(document, dict):
        yield f"{path}: not an object"
        return
    model = getattr(api, kind)
    attributes = {field: attribute for attribute, field in model.attribute_map.items()}
    for field in document.keys() - attributes.keys():
        yield f"{path}.{field}: {kind} has no such field"
    known = {attributes[field]: value for field, value in document.items() if field in attributes}
    try:
        model(**known)  # refuses a required field that is missing
    except ValueError as error:
        yield f"{path}: {error}"
    for attribute, value in known.items():
        yield from problems(value, model.openapi_types[attribute], f"{path}.{model.attribute_map[attribute]}")
