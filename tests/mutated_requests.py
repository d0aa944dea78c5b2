"""Requests for every path that takes JSON, with one field that is not as it should be."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def valid_requests(model: str) -> dict[str, list[dict[str, Any]]]:
    """Valid requests by path, with nearly every field between them."""
    chat = {"model": model, "messages": USER, "max_tokens": 2}
    completion = {"model": model, "prompt": "hi", "max_tokens": 2}
    response = {"model": model, "input": "hi", "max_output_tokens": 2}
    message = {"model": model, "messages": USER, "max_tokens": 2}
    sampled = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "frequency_penalty": 0.5}
    own = {"logits_processors": [{"name": "min_tokens", "args": {"n": 1}}], "logit_bias": {"5": 1}, "cache_salt": "a"}
    tools = [{"type": "function", "function": FUNCTION}]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    nvext = {"nvext": {"annotations": ["request_id"], "extra_fields": ["timing"]}}
    return {
        "/v1/chat/completions": [
            {**chat, **sampled, "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}},
            {**chat, **own, **nvext, "user": "u", "metadata": {"a": "b"}, "logprobs": True, "top_logprobs": 1},
            {**chat, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": True},
            {**chat, "response_format": form, "n": 2, "stop_token_ids": [5], "chat_template_kwargs": {}},
            {**chat, "guided_json": SCHEMA, "min_tokens": 1, "ignore_eos": False, "prompt_logprobs": 1},
        ],
        "/v1/completions": [
            {**completion, **sampled, "stop": "x", "echo": True, "logprobs": 1, "best_of": 1, "suffix": ""},
            {**completion, **own, **nvext, "guided_choice": ["a", "b"], "stream": True},
            {**completion, "prompt": [5, 6], "n": 2, "allowed_token_ids": [5, 6], "prompt_logprobs": 1},
            {**completion, "prompt": ["a", "b"], "guided_regex": "a+", "skip_special_tokens": True},
        ],
        "/v1/responses": [
            {
                **response,
                "instructions": "i",
                "text": {"format": {"type": "text"}, "verbosity": "medium"},
                "store": True,
            },
            {**response, **own, **nvext, "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"}},
            {**response, "tools": [{"type": "function", "strict": False, **FUNCTION}], "tool_choice": "auto"},
            {**response, "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "stream": True},
            {**response, "include": ["message.output_text.logprobs"], "top_logprobs": 1, "truncation": "disabled"},
        ],
        "/v1/responses/input_tokens": [
            {"model": model, "input": "hi", **nvext, "instructions": "i", "tools": [{"type": "function", **FUNCTION}]}
        ],
        "/v1/messages": [
            {**message, "system": "s", "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "temperature": 0.5},
            {**message, **own, "stream": True, "service_tier": "auto", "thinking": {"type": "disabled"}},
            {**message, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
        ],
        "/v1/messages/count_tokens": [{"model": model, "messages": USER, "system": [{"type": "text", "text": "s"}]}],
        "/v1/batches": [
            {
                "input_file_id": "file-1",
                "endpoint": "/v1/completions",
                "completion_window": "24h",
                "metadata": {"a": "b"},
            }
        ],
        "/tokenize": [
            {"model": model, "prompt": "hi", "add_special_tokens": True, "return_token_strs": False},
            {"model": model, "messages": USER, "tools": tools},
        ],
        "/detokenize": [{"model": model, "tokens": [5, 6]}],
    }


class Raw(str):
    """JSON as it is to be sent."""


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 5, 0.0, 1.5, -0.5, 2**31, 2**63, 2**64, 10**30, 1e308,
    "", "a", "\x00", "\ufffd", "x" * 5000, "\U0001f600", [], [[]], [None], [0], ["a"], [{}], {}, {"a": None},
    {"type": "x"}, {"type": "function"}, [10**6], [-1], [2**40],
    Raw("NaN"), Raw("Infinity"), Raw("1e999"), Raw("9" * 400), Raw('"\\ud800"'), Raw('{"\\udfff": 1}'), Raw("-0"),
    Raw("[" * 60 + "]" * 60), Raw("[" * 200 + "]" * 200), Raw("[" * 3000 + "]" * 3000),
    Raw('{"a":' * 150 + "1" + "}" * 150),
    Raw('{"a":1,"a":2}'), Raw("{"), Raw("tru"),
]  # fmt: skip
"""Values of another type, falsy, huge, nested, and no JSON at all."""


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all values below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in items for found in [(*place, key), *places(each, (*place, key))]]


def changed(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    """A copy of ``value`` with ``odd`` in one place."""
    if not place:
        return odd
    copy = value.copy()
    copy[place[0]] = odd if len(place) == 1 else changed(value[place[0]], place[1:], odd)
    return copy


def written(value: Any) -> str:
    """JSON of a value that may have `Raw` in it."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


@st.composite
def mutated_requests(draw: st.DrawFn, model: str, *, without: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """Path and body of a request with one odd field, for all paths but those of ``without``."""
    requests = valid_requests(model)
    path = draw(st.sampled_from(sorted(set(requests).difference(without))))
    body = draw(st.sampled_from(requests[path]))
    place = draw(st.sampled_from(places(body)))
    how = draw(st.sampled_from(["odd", "odd", "odd", "odd", "unknown", "left out", "twice"]))
    odd = draw(st.sampled_from(ODD))
    if how == "odd":
        return path, written(changed(body, place, odd)).encode()
    if how == "unknown":
        known = draw(st.sampled_from([name for each in requests.values() for one in each for name in one] + ["zzz"]))
        return path, written({**body, known: odd}).encode()
    name = place[0]
    if how == "left out":
        return path, written({key: each for key, each in body.items() if key != name}).encode()
    return path, (written(body)[:-1] + f",{json.dumps(name)}:{written(body[name])}" + "}").encode()


def problem(status: int, text: str) -> str | None:
    """What is wrong with an answer: it is neither a 200 nor an error that names a field."""
    if status == 200:
        lost = '"Internal server error"' in text or "event: error" in text or '"error":{' in text
        return "an error in a stream" if lost and '"error":null' not in text else None
    if not 400 <= status < 500:
        return "no 4xx"
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return "no error object"
    message = error.get("message")
    if not isinstance(message, str) or not message:
        return "no message"
    if "type" not in error or (text.startswith('{"error"') and not {"param", "code"} <= set(error)):
        return "not the form of its API"
    names_field = error.get("param") or ": " in message or message.startswith("the body ")
    return None if names_field else "no field is named"
