"""What becomes of a Responses request: its tables, and the chat request that it stands for."""

from __future__ import annotations

import contextlib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import ReasoningEffort
from openai.types import responses as types
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_audio_param,
    response_input_item_param,
    tool_param,
)

from adapters.catalog import Catalog
from worker.frontdoor.chunks import error_of
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.requests import rewritten
from worker.frontdoor.responses import fields as tables
from worker.frontdoor.responses.checks import EFFORTS
from worker.frontdoor.responses.fields import INPUT_TOKENS, OWN, PASSED_ON, RESPONSES, check_fields
from worker.frontdoor.responses.items import input_items
from worker.frontdoor.responses.kinds import FORMATS, INCLUDES, ITEMS, LOGPROBS, PARTS, TOOL_CHOICES, TOOLS, Kind
from worker.frontdoor.responses.translation import ChatRequest, as_chat

BASE: dict[str, Any] = {"model": "m", "input": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "f", "description": "Does f.", "parameters": SCHEMA, "strict": True}
OTHER = {**TOOL, "name": "g"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city":"Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
CATALOG = Catalog.default()
STORED: Any = {
    "msg_9": {
        "id": "msg_9",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "stored"}],
    }
}
CHAT_ROLES = ("system", "user", "assistant", "tool")


def translated(**fields: Any) -> ChatRequest:
    """The chat of a request with these fields beside the required ones."""
    body = {**BASE, **fields}
    check_fields(RESPONSES, body)
    return as_chat(body, [], input_items(body["input"], STORED.get))


def chat(**fields: Any) -> Any:
    return translated(**fields).fields


def messages(*items: Any, **fields: Any) -> Any:
    return chat(input=list(items), **fields)["messages"]


def user(*texts: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}


# The tables have all that the installed client knows.


def literals_of(annotation: Any, key: str = "type") -> Iterator[str]:
    """The values of ``key`` of each type of a union of dicts, or of a union of literals."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        yield from (each for each in typing.get_args(annotation) if isinstance(each, str))
    elif hasattr(annotation, "__required_keys__"):
        yield from literals_of(typing.get_type_hints(annotation)[key])
    else:
        for each in typing.get_args(annotation):
            yield from literals_of(each, key)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        (RESPONSES, response_create_params.ResponseCreateParamsStreaming),
        (INPUT_TOKENS, input_token_count_params.InputTokenCountParams),
    ],
)
def test_every_field_of_openai_has_a_row(path: str, params: type) -> None:
    rows = {row.name for row in OWN if path in row.paths} | set(PASSED_ON)
    assert set(typing.get_type_hints(params)) <= rows


@pytest.mark.parametrize(
    ("table", "annotation"),
    [
        (ITEMS, response_input_item_param.ResponseInputItemParam),
        (TOOLS, tool_param.ToolParam),
        (TOOL_CHOICES, response_create_params.ToolChoice),
        (INCLUDES, types.ResponseIncludable),
        (FORMATS, types.ResponseFormatTextConfigParam),
        (PARTS, types.ResponseInputContentParam),
        (PARTS, response_input_audio_param.ResponseInputAudioParam),
        (PARTS, types.ResponseOutputTextParam | types.ResponseOutputRefusalParam),
    ],
    ids=["items", "tools", "choices", "includes", "formats", "parts", "audio", "output"],
)
def test_every_kind_of_openai_has_a_row(table: Mapping[str, Kind], annotation: Any) -> None:
    found = set(literals_of(annotation))
    assert found
    assert found <= set(table)


def keys_of(annotation: Any, name: str) -> set[str]:
    """The fields of the type whose ``type`` is ``name``."""
    found: set[str] = set()
    for each in typing.get_args(annotation):
        if name in literals_of(each):
            found |= set(typing.get_type_hints(each))
    return found


@pytest.mark.parametrize(
    ("table", "annotation"),
    [(ITEMS, response_input_item_param.ResponseInputItemParam), (TOOLS, tool_param.ToolParam)],
    ids=["items", "tools"],
)
def test_every_field_of_a_kind_is_known(table: Mapping[str, Kind], annotation: Any) -> None:
    for kind in table.values():
        if kind.fate != "refused":
            assert keys_of(annotation, kind.name) <= set(kind.keys), kind.name


def rows_of(section: str) -> list[tuple[str, ...]]:
    """The rows of a table of the document, without the names of its columns."""
    text = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
    (found,) = re.findall(rf"<!-- {section} -->\n\n(.*?)\n\n<!-- /{section} -->", text, re.DOTALL)
    return [tuple(line.strip("| ").split(" | ")) for line in found.split("\n")[2:]]


@pytest.mark.parametrize(
    ("section", "table"),
    [
        ("items", ITEMS),
        ("parts", PARTS),
        ("tools", TOOLS),
        ("choices", TOOL_CHOICES),
        ("includes", INCLUDES),
        ("formats", FORMATS),
    ],
)
def test_the_document_shows_the_kinds(section: str, table: Mapping[str, Kind]) -> None:
    assert rows_of(section) == [(f"`{kind.name}`", kind.fate, kind.why) for kind in table.values()]


def test_the_document_shows_the_fields() -> None:
    where = {(RESPONSES,): "responses", (INPUT_TOKENS,): "input_tokens", (RESPONSES, INPUT_TOKENS): "both"}
    assert rows_of("fields") == [(f"`{row.name}`", where[row.paths], row.fate, row.why) for row in OWN]


def test_chat_s_further_fields_are_those_of_responses_too() -> None:
    elsewhere = {row.name for row in OWN} | set(tables.INSTEAD) | set(tables.ABSENT)
    assert set(TABLES[CHAT]) - elsewhere == set(PASSED_ON)
    assert {"top_k", "seed", "stop", "logits_processors", "nvext", "logit_bias"} <= set(PASSED_ON)


def test_efforts_are_openai_s() -> None:
    assert set(literals_of(ReasoningEffort)) == set(EFFORTS)


# Items and messages.


def test_a_text_is_a_message() -> None:
    assert chat(instructions="Be kind.") == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
    }


def test_an_assistant_s_turn_is_one_message() -> None:
    assert messages(user("a"), REASONING, said("I look."), CALL, {**CALL, "call_id": "c2"}, RESULT, said("Rain.")) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [
                {"id": each, "type": "function", "function": {"name": "f", "arguments": CALL["arguments"]}}
                for each in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]


def test_a_later_part_of_a_turn_begins_the_next_one() -> None:
    made = messages(user("a"), said("b"), said("c"), CALL, RESULT, CALL, REASONING, said("d"))
    assert [sorted(each) for each in made if each["role"] == "assistant"] == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["role", "tool_calls"],
        ["content", "reasoning_content", "role"],
    ]


def test_system_messages_at_the_beginning_become_one() -> None:
    developer = {"role": "developer", "content": "B"}
    made = messages(developer, {**developer, "content": "C"}, user("a"), developer, instructions="A")
    assert made == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "B"},
    ]


def test_several_parts_stay_apart() -> None:
    (message,) = messages(user("a", "b"))
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (*_, result) = messages(CALL, {**RESULT, "output": user("a", "b")["content"]})
    assert result["content"] == "a\nb"


def test_reasoning_may_be_a_summary_alone() -> None:
    summary = [{"type": "summary_text", "text": "Thought."}]
    assert messages({**REASONING, "content": None, "summary": summary})[0]["reasoning_content"] == "Thought."


def test_reasoning_without_a_text_is_nothing() -> None:
    (message,) = messages({**REASONING, "content": None}, said("a"))
    assert message == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_9"}, {"id": "msg_9"}])
def test_a_reference_is_the_stored_item(reference: dict[str, str]) -> None:
    assert messages(reference) == [{"role": "user", "content": "stored"}]


def test_items_are_written_out_as_openai_has_them() -> None:
    """What `GET /v1/responses/{id}/input_items` gives is made of them."""
    given_items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "phase": "commentary"},
        {"role": "assistant", "content": [{"type": "input_text", "text": "b"}]},
        REASONING,
        CALL,
        RESULT,
    ]
    for placed in input_items(given_items, STORED.get):
        kind = types.ResponseItemList.model_validate(
            {"object": "list", "data": [placed.item], "first_id": "a", "last_id": "b", "has_more": False},
        )
        assert kind.data[0].type == placed.item["type"]


# Fields.


def test_settings_have_chat_s_names() -> None:
    made = chat(
        max_output_tokens=9,
        reasoning={"effort": "low", "summary": "auto"},
        include=[LOGPROBS],
        top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
        temperature=0.5,
        top_k=3,
        logits_processors=[{"name": "min_tokens", "args": {"n": 3}}],
        user="u",
        metadata={"a": "b"},
        store=False,
        stream=True,
    )
    del made["messages"]
    assert made == {
        "model": "m",
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        "temperature": 0.5,
        "top_k": 3,
        "logits_processors": [{"name": "min_tokens", "args": {"n": 3}}],
    }


def test_tools_have_chat_s_form() -> None:
    function = {key: TOOL[key] for key in ("name", "description", "parameters", "strict")}
    made = chat(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert made["parallel_tool_calls"] is False


def test_allowed_tools_are_the_only_ones() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    request = translated(tools=[TOOL, OTHER], tool_choice=choice)
    assert [tool["function"]["name"] for tool in request.fields["tools"]] == ["g"]
    assert request.fields["tool_choice"] == "required"
    assert request.origins.client_path("tools[0].function.parameters.type") == "tools[1].parameters.type"


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_without_tools_there_is_nothing_to_choose(choice: str) -> None:
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(
        chat(tools=[], tool_choice=choice, parallel_tool_calls=False)
    )


NOTHING: list[dict[str, Any]] = [
    {"conversation": None, "background": False, "truncation": "disabled", "service_tier": "auto", "prompt": None},
    {"context_management": [], "moderation": None, "image": {}, "background_options": {"completion_window": "soonest"}},
    {"stream_options": {"include_obfuscation": False}, "text": {"format": {"type": "text"}}, "max_tool_calls": 3},
    {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
    {"reasoning": {"context": "auto", "mode": "standard", "generate_summary": "auto"}},
]


@pytest.mark.parametrize("fields", NOTHING)
def test_what_asks_for_nothing_changes_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


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
        "input[0].content[1].type",
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
    "mode of tools": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
        "tool_choice.mode",
    ),
    "no tool allowed": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
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


IN_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": 3}, "logit_bias"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"logits_processors": [{"name": "no_such"}]}, "logits_processors[0].name"),
    ({"nvext": {"use_raw_prompt": True}}, "nvext.use_raw_prompt"),
]


@pytest.mark.parametrize(("fields", "param"), IN_CHAT)
def test_refusals_of_the_chat_name_the_client_s_path(fields: dict[str, Any], param: str) -> None:
    request = translated(**fields)
    with pytest.raises(Refused) as caught:
        rewritten(CHAT, json.dumps(request.fields).encode(), {}, CATALOG)
    refused = request.origins.of_client(caught.value)
    assert refused.param == param
    assert refused.message.startswith(param)


def test_paths_of_messages_lead_to_their_items() -> None:
    request = translated(
        instructions="A",
        input=[user("a", "b"), REASONING, said("c"), CALL, RESULT, user("d"), {"role": "user", "content": "e"}],
    )
    paths = {
        "messages[0].content": "instructions",
        "messages[1].content[1].text": "input[0].content[1].text",
        "messages[2].reasoning_content": "input[1]",
        "messages[2].content": "input[2]",
        "messages[2].tool_calls[0].function.arguments": "input[3].arguments",
        "messages[2].tool_calls[0].id": "input[3].call_id",
        "messages[3].content": "input[4].output",
        "messages[4].content": "input[5].content[0]",
        "messages[5].content": "input[6].content",
        "messages[5]": "input[6]",
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema.type": "text.format.schema.type",
        "seed": "seed",
        "messagesx": "messagesx",
    }
    assert {path: request.origins.client_path(path) for path in paths} == paths


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
    ({"tools": [TOOL]}, "logits_processors.processors[0].args.tools[0].parameters", "tools[0].parameters"),
    (
        {"tools": [TOOL], "logits_processors": {"processors": [{}]}},
        "logits_processors.processors[0].args.tools",
        "logits_processors.processors[0].args.tools",
    ),
    (
        {"tools": [TOOL], "logits_processors": [{}]},
        "logits_processors.processors[1].args.schema.type",
        "text.format.schema.type",
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "function", "user", "message", "auto"]),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id", "name", "call_id", "tools"]), each, max_size=4
        )
    ),
    max_leaves=8,
)
NAMES = [row.name for row in OWN] + ["top_k", "logits_processors", "nvext", "other"]


def mutated(value: Any) -> st.SearchStrategy[Any]:
    """``value`` with a part in it replaced."""
    if isinstance(value, dict) and value:
        return (
            st.sampled_from(sorted(value)).flatmap(lambda key: mutated(value[key]).map(lambda new: {**value, key: new}))
            | JSON
        )
    if isinstance(value, list) and value:
        return (
            st.integers(0, len(value) - 1).flatmap(
                lambda i: mutated(value[i]).map(lambda new: [*value[:i], new, *value[i + 1 :]])
            )
            | JSON
        )
    return JSON


WHOLE = {
    "input": [user("a"), REASONING, said("b"), CALL, RESULT],
    "tools": [TOOL, OTHER],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "include": [LOGPROBS],
}


@settings(max_examples=examples(400), deadline=None)
@given(changed=mutated(WHOLE), extra=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2))
def test_any_request_is_refused_or_a_chat(changed: Any, extra: dict[str, Any]) -> None:
    fields = {**(changed if isinstance(changed, dict) else {}), **extra}
    with contextlib.suppress(FieldRefused):
        request = translated(**fields)
        assert set(request.fields) <= set(TABLES[CHAT])
        assert all(message["role"] in CHAT_ROLES for message in request.fields["messages"])
