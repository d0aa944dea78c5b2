"""vLLM's ``structured_outputs``: its one constraint is the guide that does the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body, one_guide
from worker.frontdoor.field_types import is_one_of

FIELD = "structured_outputs"
GUIDE_OF = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
"""Constraints of ``structured_outputs`` and the fields that are the same guide."""

_OBJECT = "json_object"
_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "structural_tag": ("is not supported here; name the processor in logits_processors", ()),
    "disable_any_whitespace": ("must be true or false; JSON is compact here in either case", (True, False)),
    "disable_additional_properties": ("is not supported; write additionalProperties into the schema", (False,)),
    "whitespace_pattern": ("is not supported", ("",)),
}
"""Other keys: the reason for the refusal, and the values that are taken."""


def guide_in(path: str, value: Any) -> tuple[str, str, Any]:
    """The constraint of an object of this form.

    Args:
        path: Path of the object in the client's request.
        value: The object.

    Returns:
        Path of the constraint, the field that is the same guide, and its value.

    Raises:
        FieldRefused: it is no such object, has no constraint or several, or one that is not kept.
    """
    given = values.object_within(path, value, (*GUIDE_OF, _OBJECT, *_REFUSED))
    for key, (why, taken) in _REFUSED.items():
        if not is_one_of(given.get(key), taken):
            raise FieldRefused(f"{path}.{key}", why)
    wanted = [key for key in GUIDE_OF if given.get(key) is not None]
    if values.truth(f"{path}.{_OBJECT}", given.get(_OBJECT)):
        wanted.append(_OBJECT)
    if len(wanted) != 1:
        raise FieldRefused(path, f"must have one of {', '.join(GUIDE_OF)} and {_OBJECT}, got {len(wanted)}")
    (key,) = wanted
    own = f"{path}.{key}"
    return (own, "guided_json", {"type": "object"}) if key == _OBJECT else (own, GUIDE_OF[key], given[key])


def check(value: Any, body: Body) -> None:
    """Refuse a value that cannot be kept, or that stands beside another guide; one that says the
    same, in the same order of keys, is none. Raises `FieldRefused`.
    """
    path, guide, wanted = guide_in(FIELD, value)
    if body.get(guide) is not None and json.dumps(body[guide]) != json.dumps(wanted):  # 1 is not true
        raise FieldRefused(path, f"cannot be another than {guide}; give one of them")
    try:
        one_guide(guide)(wanted, {**body, guide: wanted})
    except FieldRefused as refused:
        raise refused.renamed((refused.param or "").replace(guide, path, 1)) from None


def take(fields: Body) -> Mapping[str, str]:
    """Put the guide of a checked ``structured_outputs`` in its place.

    Args:
        fields: The request, which is changed.

    Returns:
        The path in the client's request for that of the guide; empty without the field.
    """
    if fields.get(FIELD) is None:  # a null is taken out with the other fields that ask for nothing
        return {}
    path, guide, fields[guide] = guide_in(FIELD, fields.pop(FIELD))
    return {guide: path}
