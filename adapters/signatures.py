"""Signatures of others' code, whose annotations may name what exists for type checkers alone.

Until Python 3.13 such an annotation is a text, or its function cannot be defined; from 3.14 on it
fails when it is asked for.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

_SIGNATURE: dict[str, Any] = {}
_ANNOTATIONS: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    from annotationlib import Format

    _SIGNATURE["annotation_format"] = _ANNOTATIONS["format"] = Format.FORWARDREF


def signature_of(target: Any) -> inspect.Signature:
    """`inspect.signature`; an annotation that cannot be evaluated is a text or a forward reference.

    Raises:
        TypeError: it cannot be called.
        ValueError: it has no signature.
    """
    return inspect.signature(target, **_SIGNATURE)


def annotations_of(target: Any) -> dict[str, Any]:
    """Annotations of a function by parameter, in the same form."""
    return inspect.get_annotations(target, **_ANNOTATIONS)
