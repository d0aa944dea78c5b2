"""A Responses request as the chat request that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.responses.fields import PASSED_ON
from worker.frontdoor.responses.items import PlacedItem
from worker.frontdoor.responses.kinds import LOGPROBS
from worker.frontdoor.responses.messages import Messages
from worker.frontdoor.responses.origins import Origins
from worker.frontdoor.responses.tools import chat_tools

_GUIDE = "sampling_options.guided_decoding"
PREVIOUS = "previous_response_id"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of the chat endpoint.

    Attributes:
        fields: The body, as a client would write it.
        origins: Names fields of the Responses request in refusals.
    """

    fields: Body
    origins: Origins


def as_chat(fields: Body, context: Sequence[PlacedItem], given: Sequence[PlacedItem]) -> ChatRequest:
    """The chat request that a Responses request stands for.

    Args:
        fields: The request, checked.
        context: Items of previous responses.
        given: Items of the field ``input``.

    Raises:
        FieldRefused: naming the field of the Responses request.
    """
    made = Messages()
    if fields.get("instructions"):
        made.add_instructions(fields["instructions"])
    made.add_items(context)
    made.add_items(given)
    if not made.messages:
        raise FieldRefused("input", "must have at least one item")
    tools, tool_origins = chat_tools(fields.get("tools"), fields.get("tool_choice"))
    if tools.get("tools") and fields.get("parallel_tool_calls") is not None:
        tools["parallel_tool_calls"] = fields["parallel_tool_calls"]
    passed = {name: value for name, value in fields.items() if name in PASSED_ON and value is not None}
    chat = {"model": fields.get("model"), "messages": made.messages, **passed, **tools, **_settings(fields)}
    origins = {**made.origins, **tool_origins, **_of_guide(chat)}
    return ChatRequest(chat, Origins(origins, fields.get("logits_processors")))


def _of_guide(chat: Body) -> dict[str, str]:
    """The field that the workers know as a guide: the format, or the tools if they are forced."""
    if "response_format" in chat:
        return {_GUIDE: "text.format", f"{_GUIDE}.args.schema": "text.format.schema"}
    return {f"{_GUIDE}.args.schema": "tools"} if "tools" in chat else {}


def _settings(fields: Body) -> Body:
    """Fields of chat that Responses has by another name."""
    found: Body = {}
    if fields.get("max_output_tokens") is not None:
        found["max_completion_tokens"] = fields["max_output_tokens"]
    effort = (fields.get("reasoning") or {}).get("effort")
    if effort is not None:
        found["reasoning_effort"] = effort
    if LOGPROBS in (fields.get("include") or ()):
        found["logprobs"] = True
        if fields.get("top_logprobs"):
            found["top_logprobs"] = fields["top_logprobs"]
    wanted = (fields.get("text") or {}).get("format")
    if wanted is not None and wanted["type"] != "text":
        found["response_format"] = _response_format(wanted)
    return found


def _response_format(wanted: Body) -> Body:
    if wanted["type"] == "json_object":
        return {"type": "json_object"}
    keys = ("name", "description", "schema", "strict")
    schema = {key: wanted[key] for key in keys if wanted.get(key) is not None}
    return {"type": "json_schema", "json_schema": schema}
