"""Fields of OpenAI's requests → their places in a message that `worker.runtimes.direct` serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from worker.errors import InvalidRequest
from worker.sampling import SamplingParams, sampling_controls
from worker.sampling.control import cached

_OTHER_PLACES = {
    "n": "sampling_options",
    "include_stop_str_in_output": "sampling_options",
    "stop_token_ids": "stop_conditions",
    "skip_special_tokens": "output_options",
}


@cached
def places(record: type[SamplingParams]) -> Mapping[str, str]:
    """Section of the message in which a field of a body stands under the same name.

    Args:
        record: `SamplingParams` or a class derived from it, whose controls are fields of a body.
    """
    controls = (one for one in sampling_controls(record) if one.is_client_field)
    return {name: section for one in controls for section, name in [one.paths[0].split(".")]} | _OTHER_PLACES


def guide_of(form: Any) -> dict[str, Any] | None:
    """The guide that ``response_format`` asks for, None if it asks for none.

    Raises:
        InvalidRequest: it is none of the known ones.
    """
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    schema = form.get("json_schema") if kind == "json_schema" else None
    if isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping | bool):
        return {"json": schema["schema"]}
    raise InvalidRequest("response_format", "must be of type text, json_object or json_schema with its schema")


def with_objects(messages: Any) -> Any:
    """The messages of a chat, whose calls have their arguments as objects, which chat templates
    expect. What is no list of messages, and arguments that are no JSON, stay as they are.
    """
    return [_with_objects(each) for each in messages] if isinstance(messages, list) else messages


def _with_objects(message: Any) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
        json.dumps(arguments, ensure_ascii=False).encode()  # half of a surrogate pair stays an escape
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
