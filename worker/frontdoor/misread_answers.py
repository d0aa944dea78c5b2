"""JSON answers that Dynamo's frontend would read as tool calls.

Its parser ``hermes`` takes any JSON object with a text ``name`` at its top, or a list of such, for
a call, whether or not the request has tools: the client would get ``content: null``. Versions from
1.6 on do not, and no version does in a stream.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any
from urllib.parse import unquote

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body, forces_call, is_before_1_6

PARSER = "hermes"
_COMBINED = ("anyOf", "oneOf", "allOf", "prefixItems")
_PARTS = ("items", "then", "else")
"""Keywords whose schemas apply to the answer itself, or to an item of a list that it is."""


def check_answer_is_no_call(fields: Body, call_format: str) -> None:
    """Refuse a chat whose JSON answer the frontend would take for a call.

    Args:
        fields: Fields of a request, checked.
        call_format: Format in which the models write tool calls.

    Raises:
        FieldRefused: naming the guide.
    """
    if call_format != PARSER or "messages" not in fields or fields.get("stream") or forces_call(fields):
        return
    for field, schema in _schemas(fields):
        if _may_have_name(schema, schema, set()) and frontend_misreads():
            raise FieldRefused(
                field,
                "the frontend would read the answer as a tool call, since its parser hermes takes any JSON with a "
                'text "name" at its top for one: set stream to true, or give the property another name',
            )


@cache
def frontend_misreads() -> bool:
    """Whether the version of Dynamo that is installed here does; False where there is none."""
    return is_before_1_6()


def _schemas(fields: Body) -> Iterator[tuple[str, Any]]:
    wanted = fields.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        yield "response_format", wanted["json_schema"]["schema"]
    guide = fields.get("guided_json")
    if isinstance(guide, str):
        with contextlib.suppress(ValueError):  # the worker says what is wrong with it
            guide = json.loads(guide)
    if guide is not None:
        yield "guided_json", guide


def _may_have_name(schema: Any, root: Any, seen: set[int]) -> bool:
    """Whether the schema names a property ``name`` at its top that may be a text.

    Args:
        schema: Schema of the answer, or of a part of `root` that may apply to it.
        root: Document that references lead into.
        seen: Ids of the schemas that have been looked at: each once, however many references there
            are.
    """
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    seen.add(id(schema))
    properties = schema.get("properties")
    if isinstance(properties, dict) and "name" in properties and _may_be_text(properties["name"]):
        return True
    lists = [schema[key] for key in _COMBINED if isinstance(schema.get(key), list)]
    parts = [schema.get(key) for key in _PARTS] + [each for part in lists for each in part]
    if isinstance(schema.get("$ref"), str):
        parts.append(_target(schema["$ref"], root))
    return any(_may_have_name(part, root, seen) for part in parts)


def _may_be_text(schema: Any) -> bool:
    """True unless the schema plainly says otherwise."""
    if not isinstance(schema, dict):
        return schema is not False
    if "const" in schema:
        return isinstance(schema["const"], str)
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _target(reference: str, root: Any) -> Any:
    """The schema that a reference within the document names (RFC 6901), None if there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in filter(None, unquote(reference[1:]).split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step[:9]) < len(found):
            found = found[int(step[:9])]
        else:
            return None
    return found
