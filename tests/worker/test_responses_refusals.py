"""What is refused of a Responses request, by whomever, names the path in the client's request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from responses_requests import CALL, OTHER, REASONING, RESULT, SCHEMA, TOOL, said, translated, user
from rewritten_requests import rewritten

from adapters.catalog import Catalog
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.frontend_errors import error_of
from worker.frontdoor.responses.kinds import LOGPROBS

CATALOG = Catalog.default()


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{**TOOL, **fields}]}


def item(base: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input": [user("a"), {**base, **fields}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"inputs": "a"}, "inputs"),
    "chat's name": ({"messages": []}, "messages"),
    "chat's limit": ({"max_tokens": 3}, "max_tokens"),
    "several": ({"n": 2}, "n"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "tier": ({"service_tier": "flex"}, "service_tier"),
    "cache": ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    "retention": ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    "compaction": ({"context_management": [{"type": "compaction"}]}, "context_management"),
    "moderation": ({"moderation": {"model": "m"}}, "moderation"),
    "image": ({"image": {"context_compression": "enabled"}}, "image"),
    "programs": ({"access_programs": {"cyber": "standard"}}, "access_programs"),
    "limit": ({"max_output_tokens": 0}, "max_output_tokens"),
    "limit's type": ({"max_output_tokens": True}, "max_output_tokens"),
    "stream": ({"stream": "yes"}, "stream"),
    "obfuscation": ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    "options": ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    "not stored": ({"background": True, "store": False}, "background"),
    "window": ({"background_options": {"completion_window": "8h"}}, "background_options.completion_window"),
    "metadata": ({"metadata": {"a": 1}}, "metadata.a"),
    "much metadata": ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    "a long key": ({"metadata": {"k" * 65: ""}}, "metadata." + "k" * 57 + "..."),
    "a long value": ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    "include": ({"include": [LOGPROBS, "web_search_call.results"]}, "include[1]"),
    "unknown include": ({"include": ["all"]}, "include[0]"),
    "alternatives": ({"top_logprobs": 2}, "top_logprobs"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "format's name": ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    "chat's schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "json_schema": {}}}},
        "text.format.json_schema",
    ),
    "summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "reasoning": ({"reasoning": {"budget": 3}}, "reasoning.budget"),
    "mode": ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    "no items": ({"input": []}, "input"),
    "a number": ({"input": 3}, "input"),
    "no item": ({"input": ["a"]}, "input[0]"),
    "search": ({"input": [{"type": "web_search_call", "id": "a", "status": "completed"}]}, "input[0].type"),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    "role": (item({"role": "tool", "content": "a"}), "input[1].role"),
    "content": (item({"role": "user", "content": 3}), "input[1].content"),
    "picture": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
        "input[0].content[1].image_url",
    ),
    "output of a user": (item(said("a"), role="user"), "input[1].content[0].type"),
    "part's text": (item({"role": "user", "content": [{"type": "input_text"}]}), "input[1].content[0].text"),
    "part's key": (
        item({"role": "user", "content": [{"type": "input_text", "text": "", "x": 1}]}),
        "input[1].content[0].x",
    ),
    "message's key": (item({"role": "user", "content": "a", "name": "b"}), "input[1].name"),
    "status": (item({"role": "user", "content": "a", "status": "done"}), "input[1].status"),
    "a result without its call": (item(RESULT), "input[1].call_id"),
    "call's name": (item(CALL, name=None), "input[1].name"),
    "arguments": (item(CALL, arguments={}), "input[1].arguments"),
    "caller": (item(CALL, caller={"type": "program", "caller_id": "p"}), "input[1].caller"),
    "namespace": (item(CALL, namespace="n"), "input[1].namespace"),
    "encrypted": (item(REASONING, encrypted_content="x"), "input[1].encrypted_content"),
    "reasoning's part": (item(REASONING, content=[{"type": "text", "text": "a"}]), "input[1].content[0].type"),
    "tool": ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1].type"),
    "custom tool": ({"tools": [{"type": "custom", "name": "c"}]}, "tools[0].type"),
    "chat's tool": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
    "tool's name": (tool(name=None), "tools[0].name"),
    "deferred": (tool(defer_loading=True), "tools[0].defer_loading"),
    "asynchronous": ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
    "results": (tool(output_schema=SCHEMA), "tools[0].output_schema"),
    "callers": (tool(allowed_callers=["programmatic"]), "tools[0].allowed_callers"),
    "choice": ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice"),
    "an object's word": ({"tools": [TOOL], "tool_choice": "function"}, "tool_choice"),
    "choice's type": ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    "chat's choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function",
    ),
    "another tool allowed": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}},
        "tool_choice.tools[0].description",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_path(name: str) -> None:
    fields, param = REFUSED[name]
    with pytest.raises(FieldRefused) as caught:
        translated(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert caught.value.message.startswith(f"{param}: ")


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"tools": [TOOL, OTHER], "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}


IN_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": 3}, "logit_bias"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "guided_regex"),
    ({"logits_processors": [{"name": "no_such"}]}, "logits_processors[0].name"),
    ({"nvext": {"use_raw_prompt": True}}, "nvext.use_raw_prompt"),
    *(
        ({"nvext": {"extra_fields": ["engine_data", name]}}, "nvext.extra_fields")
        for name in ("completion_token_ids", "prompt_token_ids", "prompt_logprobs")
    ),
    (allowing("none", "f"), "tool_choice.mode"),
    (allowing("auto"), "tool_choice.tools"),
    (allowing("auto", "f", "h"), "tool_choice.tools[1].name"),
]


@pytest.mark.parametrize(("fields", "param"), IN_CHAT)
def test_refusals_of_the_chat_name_the_client_s_path(fields: dict[str, Any], param: str) -> None:
    request = translated(**fields)
    with pytest.raises(Refused) as caught:
        rewritten(CHAT, json.dumps(request.fields).encode(), {}, CATALOG)
    refused = request.origins.of_client(caught.value)
    assert refused.param == param
    assert refused.message.startswith(param)


BY_WORKERS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "sampling_options.guided_decoding.args.schema",
        "text.format.schema",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required"},
        "sampling_options.guided_decoding.args.schema",
        "tools",
    ),
    *(
        ({"tools": [TOOL]}, path, path)  # a selection of the client's own, wherever it stands
        for path in (
            "logits_processors.processors[0].args.tools[0].parameters",
            "logits_processors.processors[1].args.schema.type",
        )
    ),
    ({"logits_processors": [{}]}, "logits_processors.processors[0].args.n", "logits_processors[0].args.n"),
]


@pytest.mark.parametrize(("fields", "path", "expected"), BY_WORKERS)
def test_what_workers_refuse_leads_to_the_field(fields: dict[str, Any], path: str, expected: str) -> None:
    refused = translated(**fields).origins.of_client(Refused(400, f"{path}: is bad", path))
    assert (refused.param, refused.message) == (expected, f"{expected}: is bad")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Validation: Temperature must be between 0 and 2, got 9", "temperature"),
        ("Validation: Max completion tokens must not exceed 9, got 10", "max_output_tokens"),
        ("Validation: `messages[0].tool_calls[0].function.arguments` must be JSON", "input[0].arguments"),
        ("Validation: Something else must be so", None),
        ("seed: must be an integer", "seed"),
        ("Model not found", None),
    ],
)
def test_what_the_frontend_refuses_leads_to_the_field(message: str, param: str | None) -> None:
    body = json.dumps({"message": message, "type": "Bad Request", "code": 400}).encode()
    refused = translated(input=[CALL, RESULT]).origins.of_client(error_of(400, body))
    assert refused.param == param
    assert "messages[0]" not in refused.message


def test_an_unknown_model_leads_to_the_list_of_models() -> None:
    refused = error_of(404, json.dumps({"message": "Model not found", "code": 404}).encode())
    assert (refused.param, refused.code) == ("model", "model_not_found")
    assert refused.message == "model: Model not found; /v1/models lists those that are served"
