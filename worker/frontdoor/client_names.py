"""Names of a chat's or completion's fields for the paths in errors: those of the selection of
processors, which other fields become part of, and those of the worker's request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from adapters.catalog import MAX_BYTES, METADATA_KEY
from worker.frontdoor.field_checks import GUIDES, Body
from worker.frontdoor.field_processors import FieldProcessor
from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.nvext import annotations_of
from worker.requests.request import LOGPROBS_MODE
from worker.runtimes.direct.pictures import told_path

SELECTION_FIELD = "logits_processors"
METADATA_HEADER = b"x-dynamo-meta-" + METADATA_KEY.encode()
"""The header in which a selection of processors may come instead."""

Naming = Callable[[str], str]
"""Function from a path to that of the client's field."""

_ENTRY = re.compile(r"processors\[(\d+)\](.*)", re.DOTALL)
_IN_SECTION = re.compile(
    r"(?:(?:extra_args\.)?(?:sampling_options|stop_conditions|output_options|routing|nvext)|sampling_params)"
    r"\.(\w+)(.*)",
    re.DOTALL,
)
_ARGUMENT = re.compile(r"\A\.args\.\w+")
"""Argument of the processor that a field stands for."""

_PROMPT = ("token_ids", "prompt_token_ids")
_BY_ANOTHER_NAME = {
    "max_tokens": "max_completion_tokens",
    "max_thinking_tokens": "thinking_token_budget",
    "stop_token_ids_visible": "stop_token_ids",
    "stop_token_ids_hidden": "stop_token_ids",
}
"""Fields of the worker's request → fields of the client's that they may be made of."""


def selection_names(listed: Sequence[Any], made: Sequence[FieldProcessor], chosen: Any) -> Naming:
    """Function from a path in the selection to that of the client's field.

    Args:
        listed: Processors of the selection that the client wrote itself.
        made: Processors of other fields, which follow them.
        chosen: The field that selects processors, if there is one.
    """

    def name(path: str) -> str:
        entry = _ENTRY.fullmatch(path)
        if entry and len(listed) <= int(entry[1]) < len(listed) + len(made):
            return made[int(entry[1]) - len(listed)].client_path(entry[2])
        if not path and made:  # all of it is at fault: it is too large, or has an unknown key
            largest = max(made, key=lambda each: len(json.dumps(each.entry)))
            if len(json.dumps(largest.entry)) > len(json.dumps(listed)) and _num_bytes(listed, made) > MAX_BYTES // 2:
                return largest.client_path("")
        if path == "processors" and not listed and len(made) == 1:
            return made[0].client_path("")
        if path == "processors" and chosen is None:
            return SELECTION_FIELD
        if isinstance(chosen, list) and path.startswith("processors"):
            return SELECTION_FIELD + path.removeprefix("processors")
        return f"{SELECTION_FIELD}.{path}" if path else SELECTION_FIELD

    return name


def _num_bytes(listed: Sequence[Any], made: Sequence[FieldProcessor]) -> int:
    return len(json.dumps(listed)) + sum(len(json.dumps(each.entry)) for each in made)


def worker_names(endpoint: str, fields: Body, of_selection: Naming) -> Naming:
    """Function from a path in the worker's request to that of the client's field.

    Args:
        endpoint: `CHAT` or `COMPLETIONS`.
        fields: The client's fields.
        of_selection: Names of paths in the selection.
    """

    def name(path: str) -> str:
        if path == SELECTION_FIELD or path.startswith(f"{SELECTION_FIELD}."):
            return of_selection(path.removeprefix(SELECTION_FIELD).removeprefix("."))
        if path in _PROMPT:
            if (fields.get("nvext") or {}).get("token_data") is not None:
                return "nvext.token_data"
            return "messages" if endpoint == CHAT else "prompt"
        if path == "annotations":
            return _annotation(fields)
        if path == "routing.lora_name":  # an adapter is chosen as a model
            return "model"
        found = _IN_SECTION.fullmatch(path)
        if found is None:
            return told_path(path, fields.get("messages"))
        own, rest = found[1], _ARGUMENT.sub("", found[2])
        if own == "guided_decoding":
            return _guide(fields)
        if own == "logits_processor":  # the chain that was made of the selection
            return of_selection("processors")
        other = _BY_ANOTHER_NAME.get(own, own)
        own = other if fields.get(other) is not None else own
        if own in (fields.get("nvext") or {}):
            return f"nvext.{own}{rest}"
        return own + rest if own in TABLES[endpoint] else path

    return name


def _annotation(fields: Body) -> str:
    """The field that is an annotation to the worker."""
    is_mode = any(text.startswith(LOGPROBS_MODE) for text in annotations_of(fields.get("nvext")))
    return "logprobs_mode" if is_mode else "nvext.annotations"


def _guide(fields: Body) -> str:
    """The field that is a guide to the worker."""
    wanted = fields.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") != "text":
        return "response_format.json_schema.schema" if "json_schema" in wanted else "response_format"
    return next((name for name in GUIDES if fields.get(name) is not None), "tools")
