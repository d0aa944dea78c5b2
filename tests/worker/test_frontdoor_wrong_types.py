"""Values of a wrong type: each is a 400 that names its field, before anything is asked behind."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_frontdoor_exchange import CHUNKS, says
from test_frontdoor_server import error_of, get, house, post

from adapters.catalog import Catalog
from worker.frontdoor.encoding import encoded
from worker.frontdoor.fields import CHAT, INSTEAD, TABLES, instead_of

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def called(**call: Any) -> dict[str, Any]:
    return chat(messages=[USER, {"role": "assistant", "tool_calls": [{**CALL, **call}]}])


def function(**fields: Any) -> dict[str, Any]:
    return chat(tools=[{**TOOL, "function": {**TOOL["function"], **fields}}])


def formatted(**fields: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}, **fields}})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(tools=True), "tools"),
        (chat(tools=0), "tools"),
        (chat(messages=[5]), "messages[0]"),
        (chat(messages=[{"role": 1, "content": "a"}]), "messages[0].role"),
        (chat(messages=[{"role": "user", "content": 5}], tools=[TOOL]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": {}}], tools=[TOOL]), "messages[0].content"),
        (chat(messages=[{"role": "assistant", "tool_calls": 0}]), "messages[0].tool_calls"),
        (called(type="custom"), "messages[1].tool_calls[0].type"),
        (called(id=5), "messages[1].tool_calls[0].id"),
        (called(function="f"), "messages[1].tool_calls[0].function"),
        (called(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments"),
        (function(description=5), "tools[0].function.description"),
        (function(strict="yes"), "tools[0].function.strict"),
        (chat(logits_processors=0), "logits_processors"),
        (chat(logits_processors=False), "logits_processors"),
        (chat(modalities=""), "modalities"),
        (chat(store=0), "store"),
        (chat(guided_json=False), "guided_json"),
        (chat(stream_options={"include_obfuscation": 0}), "stream_options.include_obfuscation"),
        (chat(nvext={"use_raw_prompt": 0}), "nvext.use_raw_prompt"),
        (chat(response_format={"type": "json_schema", "json_schema": 5}), "response_format.json_schema.schema"),
        (chat(response_format="json"), "response_format"),
        (chat(prediction={}), "prediction.type"),
        (chat(prediction={"type": ["content"], "content": "a"}), "prediction.type"),
        (chat(prediction={"type": "content"}), "prediction.content"),
        (chat(prediction={"type": "content", "content": [{"type": "text"}]}), "prediction.content[0].text"),
        (chat(prediction={"type": "content", "content": ["a"]}), "prediction.content[0]"),
        (chat(prediction={"type": "content", "content": "a", "text": "a"}), "prediction.text"),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
            "response_format.json_schema.name",
        ),
        (chat(messages=[{"role": "function", "name": "f", "content": None}]), "messages[0].content"),
        (
            chat(messages=[{"role": "function", "name": "f", "content": [{"type": "text", "text": "a"}]}]),
            "messages[0].content",
        ),
        (chat(messages=[{"role": "function", "content": "a"}]), "messages[0].name"),
        (function() | {"messages": []}, "messages"),
        (chat(messages=[{"role": "assistant", "reasoning_content": 5}]), "messages[0].reasoning_content"),
        (function(parameters=5), "tools[0].function.parameters"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}, "zzz": 1}), "tool_choice.zzz"),
        (
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f", "zzz": 1}}),
            "tool_choice.function.zzz",
        ),
        *(
            (formatted(**{key: value}), f"response_format.json_schema.{key}")
            for key, value in {"zzz": 1, "description": 5, "strict": "yes", "name": 5}.items()
        ),
        (chat(stop=""), "stop"),
        (chat(stop_token_ids=[5, True]), "stop_token_ids[1]"),
        (chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
        (chat(stop_token_ids=[2**32]), "stop_token_ids[0]"),
        (chat(logit_bias={"5": 1, "05": 1}), "logit_bias"),
        (chat(logit_bias={"\u0661": 1}), "logit_bias"),
        ({"messages": [USER]}, "model"),
        ({"model": "m"}, "messages"),
    ],
)
async def test_a_chat(body: dict[str, Any], param: str) -> None:
    async with house(says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(post(encoded(body))))
        assert at.frontends[0].requests == []
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1, "include": 5}, "top_logprobs"),
        ({"text": {"verbosity": 0}}, "text.verbosity"),
        ({"reasoning": {"summary": 0}}, "reasoning.summary"),
        ({"conversation": False}, "conversation"),
        ({"tools": 0}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "description": 5}]}, "tools[0].description"),
        ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools[0].strict"),
    ],
)
async def test_a_response(fields: dict[str, Any], param: str) -> None:
    async with house(says(*CHUNKS)) as at:
        body = encoded({"model": "m", "input": "a", **fields})
        status, error = error_of(await at.ask(post(body, path="/v1/responses")))
        assert at.frontends[0].requests == []
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": "2"}, 'n: must be an integer from 1 to 128, got "2"'),
        ({"n": True}, "n: must be an integer from 1 to 128, got true"),
        ({"n": []}, "n: must be an integer from 1 to 128, got a list"),
        ({"echo": "true"}, 'echo: must be true or false, got "true"'),
        ({"echo": 1}, "echo: must be true or false, got 1"),
        ({"return_token_ids": "true"}, 'return_token_ids: must be true or false, got "true"'),
        ({"prompt_logprobs": "5"}, 'prompt_logprobs: must be an integer from 0 to 100, got "5"'),
        ({"stop": [""]}, 'stop[0]: must be a text that is not empty, got ""'),
        ({"stop": [None]}, "stop[0]: must be a text that is not empty, got null"),
        ({"stop": {}}, "stop: must be a list, each a text that is not empty, got an object"),
        ({"nvext": [1]}, "nvext: must be an object, got a list"),
        ({"nvext": "x" * 70}, f'nvext: must be an object, got "{"x" * 56}...'),
    ],
)
async def test_a_message_shows_a_value_as_json(fields: dict[str, Any], message: str) -> None:
    """A text has its quotes: "2" is not refused as the 2 that was wanted."""
    async with house(says(*CHUNKS)) as at:
        body = encoded({"model": "m", "prompt": "a", **fields})
        status, error = error_of(await at.ask(post(body, path="/v1/completions")))
    assert (status, error["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "metadata": 5}, "metadata: must be an object, got 5"),
        ("/v1/messages", {"messages": "a", "max_tokens": 5}, 'messages: must be a list, got "a"'),
        ("/v1/responses", {"input": "a", "previous_response_id": 5}, "previous_response_id: must be a text, got 5"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs: must be true or false, got 1"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "prompt_logprobs": 1, "nvext": {"extra_fields": 5}},
            "nvext.extra_fields: must be a list, each a text, got 5",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "prompt_logprobs": 1, "nvext": 5},
            "nvext: must be an object, got 5",
        ),
    ],
)
async def test_every_endpoint_shows_a_value_as_json(path: str, fields: dict[str, Any], message: str) -> None:
    async with house(says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(post(encoded({"model": "m", **fields}), path=path)))
        assert at.frontends[0].requests == []
    assert (status, error["message"]) == (400, message)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(["a", [1]], "prompt[1]"), ([[1], [2], "a"], "prompt[2]"), ([[1], 2], "prompt[1]"), (["a", True], "prompt[1]")],
)
async def test_prompts_of_two_kinds(prompt: Any, param: str) -> None:
    async with house(says(*CHUNKS)) as at:
        body = encoded({"model": "m", "prompt": prompt})
        status, error = error_of(await at.ask(post(body, path="/v1/completions")))
        assert at.frontends[0].requests == []
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_compressed_body(path: str) -> None:
    async with house(says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(post(b"\x1f\x8b", "Content-Encoding: gzip", path=path)))
    assert status == 415
    assert "compressed" in error["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/ping", "/tokenize"],
)
async def test_an_unknown_parameter(path: str) -> None:
    async with house(says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(post(encoded(chat()), path=f"{path}?beta=true&x=1")))
        assert at.frontends[0].requests == []
    assert status == 400
    assert error["message"].startswith("x: " if path == "/v1/messages" else "beta: ")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"bad_words": ["a"]}, "use bad_words or phrase_ban of logits_processors"),
        ({"vllm_xargs": {"a": 1}}, "use arguments of a processor of logits_processors"),
        ({"ebnf": "root ::= a"}, "use guided_grammar, in Lark's syntax"),
        ({"n_predict": 8}, "use max_tokens"),
        ({"dry_multiplier": 0.8}, "use dry of logits_processors"),
        ({"typical_p": 0.9}, "use typical_p of logits_processors"),
        ({"temprature": 0.9}, "did you mean temperature?"),
        ({"maxTokens": 9}, "did you mean max_tokens?"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_unknown_fields_name_what_is_here_instead(path: str, field: dict[str, Any], said: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **field}
    if path == "/v1/completions":
        body = {"model": "m", "prompt": "x", **field}
    async with house(says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(post(encoded(body), path=path)))
    assert (status, error["code"], error["param"]) == (400, "unknown_parameter", *field)
    assert f"is not a field of {path}; {said}" in error["message"]


def test_what_is_named_instead_is_served() -> None:
    names = {row.name for table in TABLES.values() for row in table.values() if row.fate != "refused"}
    processors = Catalog.default().names
    for name, instead in INSTEAD.items():
        assert any(name not in table for table in TABLES.values()), name
        assert {*names, *processors} & {*re.findall(r"\w+", instead)} or instead.startswith("POST "), name


@pytest.mark.parametrize("name", ["x", "services_tier", "temperature" * 100_000])
def test_unknown_fields_that_are_like_none(name: str) -> None:
    assert instead_of(name, TABLES[CHAT], ()) == ""


async def test_a_parameter_twice_among_thousands() -> None:
    query = "&".join(f"a{i}" for i in range(3000))
    async with house(says(*CHUNKS)) as at:
        status, error = error_of(await at.ask(get(f"/v1/responses/r?{query}&a2999")))
    assert (status, error["param"]) == (400, "a2999")
