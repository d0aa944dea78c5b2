"""What OpenAI's client says of events and responses: its types, and its own accumulation."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from openai import BaseModel, omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

OUR_OWN = {"nvext", "store", "name", "bytes"}
"""Fields that we add to OpenAI's types: two of the response, the name in the last event of a call's
arguments, which other versions of the client have, and the bytes in the log probabilities of an
event, which OpenAI's answers have too.
"""


def _classes() -> Iterator[tuple[str, type[BaseModel]]]:
    (union, _) = typing.get_args(ResponseStreamEvent)
    for each in typing.get_args(union):
        (name,) = typing.get_args(each.model_fields["type"].annotation)
        yield name, each


EVENTS: Mapping[str, type[BaseModel]] = dict(_classes())
"""Type of an event → its class."""


def check_extra(value: Any) -> None:
    """Nothing has a field that OpenAI's types do not have, but for `OUR_OWN`."""
    if isinstance(value, BaseModel):
        assert set(value.model_extra or {}) <= OUR_OWN, (type(value), value.model_extra)
        for name in type(value).model_fields:
            check_extra(getattr(value, name))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            check_extra(each)


def checked_response(response: Any) -> Response:
    """A response, validated."""
    found = Response.model_validate(response)
    check_extra(found)
    return found


def checked_event(event: Mapping[str, Any]) -> Any:
    """An event, validated."""
    found = EVENTS[event["type"]].model_validate(event)
    check_extra(found)
    return found


def check_stream(events: Iterable[Mapping[str, Any]]) -> Response:
    """Validate a whole stream: each event, their numbers and their order; the deltas put together
    are the final response, by OpenAI's accumulation and by our own.

    Returns:
        The final response.
    """
    found = [checked_event(event) for event in events]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    state: Any = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in found:
        state.handle_event(event)
    final: Response = found[-1].response
    assert found[0].type == "response.created"
    assert found[-1].type == f"response.{final.status}"
    snapshot = state._ResponseStreamState__current_snapshot
    texts = [text for item in snapshot.output for text in _texts(item)]
    assert texts == [text for item in final.output for text in _texts(item)]
    items = _put_together(found[2 if found[1].type == "response.in_progress" else 3 : -1])
    assert [each.to_dict() for each in items] == [each.to_dict() for each in final.output]
    return final


def _texts(item: Any) -> list[str]:
    """What OpenAI's accumulation puts together."""
    if item.type == "function_call":
        return [item.arguments]
    return [part.text for part in item.content] if item.type == "message" else []


def _put_together(events: Sequence[Any]) -> list[Any]:
    """The items, each from its beginning to its end, one after the other."""
    items: list[Any] = []
    rest = list(events)
    while rest:
        added = rest.pop(0)
        assert (added.type, added.output_index) == ("response.output_item.added", len(items))
        assert added.item.status == "in_progress"
        middle = []
        while rest[0].type != "response.output_item.done":
            middle.append(rest.pop(0))
        done = rest.pop(0)
        assert (done.output_index, done.item.id, done.item.type) == (len(items), added.item.id, added.item.type)
        _CHECKS[done.item.type](done.item, middle)
        for event in middle:
            assert (event.item_id, event.output_index) == (done.item.id, len(items))
        items.append(done.item)
    return items


def _check_message(item: Any, events: Sequence[Any]) -> None:
    (part,) = item.content
    begin, *deltas, last, end = events
    assert begin.type == "response.content_part.added"
    assert begin.part.text == ""
    assert {event.type for event in deltas} <= {"response.output_text.delta"}
    assert (last.type, end.type) == ("response.output_text.done", "response.content_part.done")
    assert "".join(event.delta for event in deltas) == last.text == end.part.text == part.text
    assert len(last.logprobs) == len(part.logprobs) >= sum(len(event.logprobs) for event in deltas)


def _check_reasoning(item: Any, events: Sequence[Any]) -> None:
    (part,) = item.content
    begin, *deltas, last, end = events
    assert begin.type == "response.content_part.added"
    assert {event.type for event in deltas} == {"response.reasoning_text.delta"}
    assert (last.type, end.type) == ("response.reasoning_text.done", "response.content_part.done")
    assert "".join(event.delta for event in deltas) == last.text == end.part.text == part.text


def _check_call(item: Any, events: Sequence[Any]) -> None:
    *deltas, last = events
    assert {event.type for event in deltas} <= {"response.function_call_arguments.delta"}
    assert last.type == "response.function_call_arguments.done"
    assert "".join(event.delta for event in deltas) == last.arguments == item.arguments


_CHECKS = {"message": _check_message, "reasoning": _check_reasoning, "function_call": _check_call}
