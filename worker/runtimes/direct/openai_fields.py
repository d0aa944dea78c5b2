"""Fields of OpenAI's requests → their places in a message that `worker.runtimes.direct` serves."""

from __future__ import annotations

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
    if isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
        return {"json": schema["schema"]}
    raise InvalidRequest("response_format", "must be of type text, json_object or json_schema with its schema")
