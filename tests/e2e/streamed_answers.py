"""Random requests to the four endpoints that generate text, and the whole answer that the events of
a stream put together.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Body = dict[str, Any]
Events = list[Any]

_CALL = '<tool_call>{"name": "weather", "arguments": {"city":"Zürich 🎉 END"}}</tool_call>'
_TEXTS = ("Hello", "Grüße, 世界 🎉", "a\n\nb", "é", '"\\ END', "  ", "<", "<tool", _CALL)
_STOPS = ("END", "e", "🎉", "}}", '"', "<tool_call>", "</tool_call>", "世", "\n", "l")
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
_NAMED = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}
_NOT_COMPARED = ("id", "call_id", "created", "created_at", "completed_at")
"""Ids and times, of which every answer has its own."""


def request(path: str, source: random.Random) -> Body:
    """The fields of a request, without its model."""
    number = source.choice([1, 3, 8, 21, 60])
    length = "max_output_tokens" if path == "responses" else "max_tokens"
    fields: Body = {length: number, "seed": source.randrange(9), "temperature": source.choice([0, 0.7, 1.5])}
    begun = "".join(source.choices(_TEXTS, k=source.randint(0, 3)))
    chosen = [{"name": "forced_prefix", "args": {"text": begun}}] if begun else []
    fields["logits_processors"] = {"processors": chosen, "receipt": source.random() < 0.5}
    return fields | _MADE[path](source)


def _some(source: random.Random, **fields: Any) -> Body:
    """Each of the fields with a probability of a third."""
    return {name: value for name, value in fields.items() if source.random() < 1 / 3}


def _chat(source: random.Random) -> Body:
    function = {"name": "weather", "parameters": _CITY}
    choices = ["auto", "none", "required", {"type": "function", "function": {"name": "weather"}}]
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": source.choice(choices)}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": _NAMED}}
    return (
        {"messages": [{"role": "user", "content": "世界"}]}
        | (tools if source.random() < 0.5 else {})
        | (_some(source, response_format=named) if source.random() < 0.5 else {})
        | _some(source, n=source.randint(1, 3), stop=source.sample(_STOPS, 2), logprobs=True)
        | _some(source, return_token_ids=True, prompt_logprobs=1, logprobs_mode="train")
    )


def _completion(source: random.Random) -> Body:
    prompt = source.choice(["Hello", [1, 5, 9], ["Hello", "One, two"], [[3, 4], [5]]])
    return (
        {"prompt": prompt}
        | _some(source, n=source.randint(1, 3), stop=source.sample(_STOPS, 2), logprobs=source.randint(0, 5))
        | _some(source, echo=True, return_token_ids=True, prompt_logprobs=1, logprobs_mode="train")
    )


def _response(source: random.Random) -> Body:
    tools: Body = {"tools": [{"type": "function", "name": "weather", "parameters": _CITY}]}
    tools["tool_choice"] = source.choice(["auto", "none", "required"])
    return (
        {"input": "世界"}
        | (tools if source.random() < 0.5 else {})
        | _some(source, stop=source.sample(_STOPS, 2), include=["message.output_text.logprobs"])
    )


def _message(source: random.Random) -> Body:
    tools: Body = {"tools": [{"name": "weather", "input_schema": _CITY}]}
    tools["tool_choice"] = {"type": source.choice(["auto", "any", "none"])}
    return (
        {"messages": [{"role": "user", "content": "世界"}]}
        | (tools if source.random() < 0.5 else {})
        | _some(source, stop_sequences=source.sample(_STOPS, 2))
    )


_MADE: Mapping[str, Callable[[random.Random], Body]] = {
    "chat/completions": _chat,
    "completions": _completion,
    "responses": _response,
    "messages": _message,
}
PATHS = tuple(_MADE)


def events_of(text: str) -> Events:
    """The data of the events of a stream, without ``[DONE]``."""
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def failed(events: Events) -> bool:
    """Whether a stream ends with an error."""
    return bool(events[-1].get("error") or (events[-1].get("response") or {}).get("error"))


def put_together(path: str, events: Events) -> Any:
    """What the events of a stream say, in the form that `said` gives to a whole answer."""
    if path == "responses":
        return compared(events[-1]["response"])
    if path == "messages":
        return _message_of(events)
    choices: dict[int, Body] = {}
    for choice in (each for event in events for each in event["choices"]):
        _join(choices.setdefault(choice["index"], {}), choice.pop("delta", {}) | choice)
    return compared([choices[index] for index in sorted(choices)])


def _join(whole: Any, part: Body) -> None:
    for name, value in part.items():
        if name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _join(calls.setdefault(call["index"], {}), call.get("function", {}))
        elif isinstance(value, dict):
            _join(whole.setdefault(name, {}), value)
        elif isinstance(value, str | list) and name not in ("role", "finish_reason"):
            whole[name] = whole[name] + value if whole.get(name) else value
        elif value is not None:
            whole[name] = value


def _message_of(events: Events) -> Any:
    blocks: list[Body] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({"partial_json": "", **event["content_block"]})
        elif event["type"] == "content_block_delta":
            _join(blocks[event["index"]], {name: text for name, text in event["delta"].items() if name != "type"})
        elif event["type"] == "message_delta":
            end = event
    inputs = [(each, each.pop("partial_json")) for each in blocks]
    for block, text in inputs:
        if block["type"] == "tool_use":
            block["input"] = _input_of(text)
    return compared([blocks, end["delta"], end["usage"]])


def _input_of(text: str) -> Any:
    """The input of a call; null for one that was cut, of which a whole answer has a part."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return None


def said(path: str, answer: Body) -> Any:
    """What a whole answer says."""
    if path == "responses":
        return compared(answer)
    if path == "messages":
        return compared(
            [answer["content"], {name: answer[name] for name in ("stop_reason", "stop_sequence")}, answer["usage"]]
        )
    choices: list[Body] = []
    for choice in answer["choices"]:
        found: Body = {}
        message = choice.pop("message", {})
        calls = enumerate(message.pop("tool_calls", None) or ())
        _join(found, message | choice)
        named = {index: call["function"] for index, call in calls}
        choices.append(found | ({"tool_calls": named} if named else {}))
    return compared(choices)


def compared(data: Any) -> Any:
    """What two answers to one request have in common."""
    if isinstance(data, Mapping):
        kept = {name: compared(value) for name, value in data.items() if name not in _NOT_COMPARED}
        cached = any(name.startswith(("cache_", "input_tokens", "prompt_tokens_details")) for name in map(str, kept))
        return {
            name: each for name, each in kept.items() if not (cached and "tokens" in str(name)) and each is not None
        }
    return [compared(each) for each in data] if isinstance(data, list) else data
