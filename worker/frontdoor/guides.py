"""Grammars of a request as logits processors, because Dynamo's frontend does not migrate guides."""

from __future__ import annotations

import json
from typing import Any

from adapters.catalog import MAX_BYTES
from adapters.strict_json import decoder
from worker.frontdoor.field_checks import GUIDES, Body
from worker.frontdoor.field_processors import FieldProcessor, stands_for

_STRICT_JSON = decoder()

LONGEST = MAX_BYTES // 2
"""Characters of JSON; a longer guide stays where it is, because a selection has less room."""


def guide_as_processor(fields: Body) -> FieldProcessor | None:
    """The processor that stands for a guide, which is taken out of ``fields``.

    None, and nothing is changed, if there is none, or if it has to stay: one beside tools is the
    tool-call parser's business.
    """
    if fields.get("tools"):
        return None
    for name in ("response_format", *GUIDES):
        processor = _processor(name, fields.get(name))
        if processor is not None and len(json.dumps(processor)) <= LONGEST:
            del fields[name]
            fields.pop("guided_decoding_backend", None)
            return stands_for(name, processor, is_control=True)
    return None


def _processor(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if name in GUIDES:
        processor, argument = GUIDES[name]
        if name == "guided_json" and isinstance(value, str):
            try:
                value = _STRICT_JSON.decode(value)
            except (ValueError, RecursionError):  # it stays, and the worker says what is wrong with it
                return None
        return {"name": processor, "args": {argument: value}}
    if value["type"] == "text":
        return None
    schema = value["json_schema"]["schema"] if value["type"] == "json_schema" else {"type": "object"}
    return {"name": "json_schema", "args": {"schema": schema}}
