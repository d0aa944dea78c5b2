"""JSON Schema of the request channel: which processors a request may name, with which arguments."""

from __future__ import annotations

from typing import Any

from adapters.catalog.catalog import Catalog
from adapters.catalog.entry import Entry
from adapters.catalog.selection import MAX_CHOICES, MAX_DEADLINE, MAX_PROCESSORS, VERSION
from adapters.contract import Stage


def selection_schema(catalog: Catalog) -> dict[str, Any]:
    """JSON Schema of a selection from ``catalog``."""
    definitions: dict[str, Any] = {}
    choices = [_choice_schema(entry, definitions) for entry in catalog.entries]
    late = [e.name for e in catalog.entries if e.processor.stage in (Stage.TEMPERATURE, Stage.TRUNCATION)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "logits_processors",
        "type": "object",
        "additionalProperties": False,
        "required": ["version"],
        "properties": {
            "version": {"const": VERSION},
            "processors": {"type": "array", "maxItems": MAX_PROCESSORS, "items": {"oneOf": choices}},
            "receipt": {"enum": [False, True, "debug"], "default": False},
            "deadline": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE},
            "order": {"type": "array", "maxItems": MAX_PROCESSORS, "uniqueItems": True, "items": {"enum": late}},
            "speculation": {"type": "boolean", "default": True},
            "prediction": {"type": "string", "default": ""},
            "choice": {"type": "integer", "minimum": 0, "maximum": MAX_CHOICES - 1, "default": 0},
        },
        "$defs": definitions,
    }


def _choice_schema(entry: Entry, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of one entry of a selection; adds the definitions it refers to to ``definitions``."""
    args = entry.args_schema(entry.name.replace("/", ".") + ".")
    definitions.update(args.pop("$defs", {}))
    return {
        "type": "object",
        "description": entry.summary,
        "additionalProperties": False,
        "required": ["name", "args"] if args.get("required") else ["name"],
        "properties": {"name": {"const": entry.name}, "args": args},
    }
