"""The chat request that a Responses request stands for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses as types
from responses_requests import (
    CALL,
    OTHER,
    REASONING,
    RESULT,
    SCHEMA,
    STORED,
    TOOL,
    chat,
    messages,
    said,
    translated,
    user,
)

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.responses.fields import OWN
from worker.frontdoor.responses.items import input_items
from worker.frontdoor.responses.kinds import LOGPROBS
from worker.frontdoor.tool_choice import with_allowed_tools

CHAT_ROLES = ("system", "user", "assistant", "tool")

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


def test_what_a_client_parsed_of_an_answer_is_left_out() -> None:
    """The openai package sends it back with the answer, and what the model says is the text."""
    answer = said('{"a":1}')
    parsed = {**answer, "content": [{**part, "parsed": {"a": 1}} for part in answer["content"]]}
    assert messages(parsed, {**CALL, "parsed_arguments": {"a": 1}}) == messages(answer, CALL)
    assert "parsed" not in input_items([parsed], lambda item_id: None)[0].item["content"][0]


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
    body = with_allowed_tools(request.fields)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["g"]
    assert body["tool_choice"] == "required"
    assert request.origins.client_path("tools[1].function.parameters.type") == "tools[1].parameters.type"


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
