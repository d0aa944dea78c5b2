"""Guides of a request: the grammar that its answer must have."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from adapters.processors.structural import format_of


def structural_format(tag: Any) -> Any:
    """The argument of `StructuralTag` for a structural tag: JSON text, or its data.

    Raises:
        ValueError, RecursionError: it is text that is not JSON.
    """
    return format_of(json.loads(tag) if isinstance(tag, str) else tag)


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """A grammar for the answer; at most one field may be set. TensorRT-LLM's, with `choice`."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None

    @property
    def given(self) -> list[str]:
        """Names of the fields that are set."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return [name for name, value in values.items() if value is not None and (name == "json" or value is not False)]

    def validate(self) -> None:
        """Raises `ValueError` if more than one kind of guide is set."""
        if len(self.given) > 1:
            raise ValueError(f"guided_decoding takes one guide, got {' and '.join(self.given)}")
