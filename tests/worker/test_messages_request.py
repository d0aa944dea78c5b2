"""Requests to Anthropic's Messages API as chats."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.messages import request as requests
from worker.frontdoor.messages.fields import FIELDS, TABLE
from worker.frontdoor.messages.request import TranslatedRequest, counted, translated
from worker.frontdoor.messages.thinking import signature_of
from worker.frontdoor.routes import COUNT_TOKENS, MESSAGES

HELLO = [{"role": "user", "content": "Hello"}]
BASE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "r"}
CALLED = [{"role": "user", "content": "u"}, {"role": "assistant", "content": [CALL]}]


def made(**fields: Any) -> TranslatedRequest:
    return translated({**BASE, **fields})


def chat(**fields: Any) -> dict[str, Any]:
    return made(**fields).chat


def refusal(**fields: Any) -> FieldRefused:
    with pytest.raises(FieldRefused) as caught:
        made(**fields)
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


def test_the_document_shows_the_table() -> None:
    """`docs/messages.md` has exactly the rows of `FIELDS`; on failure, paste the left side."""
    document = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
    part = document.partition("<!-- messages -->")[2].partition("<!-- /messages -->")[0]
    shown = re.findall(r"^\| `(\S+)` \| (messages|both) \| ([a-z ]+) \| (.*) \|$", part, re.MULTILINE)
    names = {(MESSAGES,): "messages", (MESSAGES, COUNT_TOKENS): "both"}
    assert [(row.name, names[row.paths], row.fate, row.why) for row in FIELDS] == shown


def test_a_plain_request() -> None:
    assert chat() == {"model": "m", "messages": HELLO, "max_tokens": 9}


def test_system_comes_first() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    for system, expected in (("a", "a"), (blocks, "a\nb")):
        assert chat(system=system)["messages"] == [{"role": "system", "content": expected}, *HELLO]
    assert chat(system=[])["messages"] == HELLO


def test_a_turn_is_one_message() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "f"},
    ]
    assert chat(messages=messages)["messages"] == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "de"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "f"},
    ]


def test_calls_and_results_keep_their_order() -> None:
    call = {**CALL, "id": "t2", "caller": {"type": "direct"}}
    results = [
        {**RESULT, "is_error": True},
        {**RESULT, "tool_use_id": "t2", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"type": "text", "text": "and"},
    ]
    messages = [*CALLED, {"role": "assistant", "content": [{"type": "text", "text": "t"}, call]}]
    messages.append({"role": "user", "content": results})
    function = {"name": "f", "arguments": '{"a": "é"}'}
    assert chat(messages=messages)["messages"] == [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": "t",
            "tool_calls": [{"id": id, "type": "function", "function": function} for id in ("t1", "t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: r"},
        {"role": "tool", "tool_call_id": "t2", "content": "x\ny"},
        {"role": "user", "content": "and"},
    ]


@pytest.mark.parametrize("is_shown", [True, False])
def test_thoughts_go_back_to_the_template(is_shown: bool) -> None:
    block = {
        "type": "thinking",
        "thinking": "hm é" if is_shown else "",
        "signature": signature_of("hm é", is_shown=is_shown),
    }
    messages = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "a"}]}, *HELLO]
    assert chat(messages=messages)["messages"][1] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm é",
    }


@given(st.text(), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_what_is_signed_is_read_again(thought: str, is_shown: bool) -> None:
    try:
        thought.encode()
    except UnicodeEncodeError:  # no JSON of a request has it
        return
    block = {
        "type": "thinking",
        "thinking": thought if is_shown else "",
        "signature": signature_of(thought, is_shown=is_shown),
    }
    content = [block, {"type": "text", "text": "a"}]
    messages = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert chat(messages=messages)["messages"][1]["reasoning_content"] == thought


def test_signatures_of_other_servers_are_not_checked() -> None:
    block = {"type": "thinking", "thinking": "a", "signature": "EqQB"}
    messages = [*HELLO, {"role": "assistant", "content": [block]}, *HELLO]
    assert chat(messages=messages)["messages"][1]["reasoning_content"] == "a"


def test_tools_are_functions() -> None:
    tools = [{**TOOL, "strict": True, "type": "custom", "input_examples": [{"a": "b"}], "defer_loading": False}]
    body = chat(tools=[*tools, {"name": "g", "input_schema": SCHEMA, "cache_control": None}])
    first = {"name": "f", "description": "d", "parameters": {**SCHEMA, "examples": [{"a": "b"}]}, "strict": True}
    assert [each["function"] for each in body["tools"]] == [first, {"name": "g", "parameters": SCHEMA}]
    assert "tool_choice" not in body
    assert "parallel_tool_calls" not in body


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_the_choice_of_a_tool(choice: Any, expected: Any) -> None:
    assert chat(tools=[TOOL], tool_choice=choice)["tool_choice"] == expected
    if choice["type"] != "none":
        body = chat(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert body["parallel_tool_calls"] is False


def test_a_choice_without_tools_asks_for_nothing() -> None:
    assert chat(tool_choice={"type": "auto"}) == chat(tools=[], tool_choice={"type": "none"}) == chat()


def test_stop_sequences_are_shown_by_the_frontend() -> None:
    request = made(stop_sequences=["a", "bc"])
    assert (request.chat["stop"], request.chat["include_stop_str_in_output"]) == (["a", "bc"], True)
    assert request.stop_sequences == ("a", "bc")
    assert made(stop_sequences=[]).chat == chat()


def test_what_ends_an_answer_is_asked_for_beside_min_tokens() -> None:
    request = made(stop_sequences=["a"], min_tokens=3, nvext={"annotations": ["own"]})
    assert request.asks_for_match
    assert request.chat["nvext"] == {"annotations": ["own", "return_token_ids"], "extra_fields": ["engine_data"]}
    assert not made(stop_sequences=["a"]).asks_for_match
    assert "nvext" not in made(min_tokens=3).chat


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_format_holds_the_answer(name: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    body = chat(**{name: {"format": wanted} if name == "output_config" else wanted})
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


def test_effort_is_for_the_template() -> None:
    assert chat(output_config={"effort": "high"})["reasoning_effort"] == "high"
    assert chat(output_config={"effort": None, "format": None}) == chat()


@pytest.mark.parametrize(
    ("thinking", "models_think", "switch", "budget", "is_shown"),
    [
        (None, True, None, None, True),
        ({"type": "enabled", "budget_tokens": 5}, False, True, 5, True),
        ({"type": "enabled", "budget_tokens": 5, "display": "summarized"}, False, True, 5, True),
        ({"type": "enabled", "budget_tokens": 5, "display": "omitted"}, False, True, 5, False),
        ({"type": "adaptive"}, False, True, None, True),
        ({"type": "adaptive", "display": "omitted"}, True, True, None, False),
        ({"type": "disabled"}, False, False, None, True),
        ({"type": "disabled"}, True, False, 0, True),
    ],
)
def test_thinking(thinking: Any, models_think: bool, switch: bool | None, budget: int | None, is_shown: bool) -> None:
    request = translated({**BASE, "thinking": thinking}, models_think=models_think)
    expected = None if switch is None else {"enable_thinking": switch, "thinking": switch}
    assert request.chat.get("chat_template_kwargs") == expected
    assert request.chat.get("nvext") == (None if budget is None else {"max_thinking_tokens": budget})
    assert request.shows_thoughts is is_shown


@pytest.mark.parametrize("name", ["chat_template_kwargs", "chat_template_args"])
def test_arguments_of_the_template_win_over_the_switch(name: str) -> None:
    body = chat(**{name: {"enable_thinking": False, "x": 1}}, thinking={"type": "adaptive"}, nvext={"annotations": []})
    assert body[name] == {"enable_thinking": False, "thinking": True, "x": 1}
    assert body["nvext"] == {"annotations": []}


def test_controls_of_chats_are_sent_as_they_are() -> None:
    given = {"temperature": 0.5, "seed": 3, "logits_processors": [{"name": "min_tokens"}], "cache_salt": "s"}
    assert chat(**given, min_p=None) == {**chat(), **given}


def test_what_changes_nothing_is_left_out() -> None:
    neutral = {
        "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "speed": "standard",
        "betas": ["x"],
        "container": None,
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": False,
        "thinking": None,
    }
    assert chat(**neutral) == chat()


def test_streams_have_their_usage_from_the_start() -> None:
    request = made(stream=True)
    assert request.streams
    assert request.chat["stream_options"] == {"continuous_usage_stats": True}


def test_a_last_message_is_continued_from_1_6_on(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The"}]
    for is_old in (True, False):
        monkeypatch.setattr(requests, "is_before_1_6", lambda is_old=is_old: is_old)
        if is_old:
            assert refusal(messages=messages).param == "messages[1].role"
        else:
            body = chat(messages=messages)
            assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_only_fields_of_the_prompt_can_be_counted() -> None:
    fields = {"model": "m", "messages": HELLO, "system": "s", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    assert counted(fields).chat["messages"][0] == {"role": "system", "content": "s"}
    assert counted({**fields, "thinking": {"type": "enabled", "budget_tokens": 1024}}).chat["tools"]
    with pytest.raises(FieldRefused) as caught:
        counted({**fields, "max_tokens": 3})
    assert caught.value.param == "max_tokens"
    assert set(TABLE[COUNT_TOKENS]) < set(TABLE[MESSAGES])


def block(role: str, *blocks: Any, before: Any = ()) -> dict[str, Any]:
    return {"messages": [*before, {"role": role, "content": list(blocks)}]}


THOUGHT = {"type": "thinking", "thinking": "a", "signature": signature_of("b", is_shown=True)}
BOMB = {"type": "thinking", "thinking": "", "signature": "dlw.text.!"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"n": 2}, "n"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": 3}, "model"),
        ({"stream": 1}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [], "system": "s"}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        (block("user", {"type": "image", "source": {}}), "messages[0].content[0].source.type"),
        (block("user", {"type": "text"}), "messages[0].content[0].text"),
        (block("user", {"type": "text", "text": "a", "x": 1}), "messages[0].content[0].x"),
        (block("user", {"type": "text", "text": "a", "cache_control": 1}), "messages[0].content[0].cache_control"),
        (block("user", {"type": "text", "text": "a", "citations": [{}]}), "messages[0].content[0].citations"),
        (block("user", CALL), "messages[0].content[0].type"),
        (block("user", RESULT), "messages[0].content[0].tool_use_id"),
        (block("user", {**RESULT, "is_error": 1}, before=CALLED), "messages[2].content[0].is_error"),
        (
            block("user", {**RESULT, "content": [{"type": "image"}]}, before=CALLED),
            "messages[2].content[0].content[0].type",
        ),
        (block("assistant", RESULT, before=HELLO), "messages[1].content[0].type"),
        (block("assistant", CALL, before=HELLO), "messages[1]"),
        (block("assistant", before=HELLO), "messages[1]"),
        (block("assistant", {**CALL, "input": "a"}, before=HELLO), "messages[1].content[0].input"),
        (block("assistant", {**CALL, "caller": {"type": "x"}}, before=HELLO), "messages[1].content[0].caller"),
        (block("assistant", CALL, CALL, before=HELLO), "messages[1].content[1].id"),
        (block("assistant", THOUGHT, before=HELLO), "messages[1].content[0].thinking"),
        (block("assistant", BOMB, before=HELLO), "messages[1].content[0].signature"),
        (block("assistant", {"type": "redacted_thinking", "data": "a"}, before=HELLO), "messages[1].content[0]"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
        ({"tools": [{**TOOL, "name": None}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{**TOOL, "input_examples": [3]}]}, "tools[0].input_examples[0]"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a"], "stop_token_ids": [3]}, "stop_token_ids"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}, "nvext": {"max_thinking_tokens": 3}},
            "nvext.max_thinking_tokens",
        ),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages[0].content", "system"),
        ("messages[1]", "messages[0]"),
        ("messages[3].content[0]", "messages[2].content[0]"),
        ("token_ids", "messages"),
        ("tools[0].function.parameters.type", "tools[0].input_schema.type"),
        ("tools[0].function.strict", "tools[0].strict"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("response_format.json_schema.schema.type", "output_config.format.schema.type"),
        ("sampling_options.guided_decoding.args.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        *(
            (path, path)  # a selection of the client's own, wherever it stands
            for path in (
                "logits_processors.processors[0].args.tools[0].parameters.a",
                "logits_processors.processors[1].args.schema.a",
                "logits_processors[1].name",
            )
        ),
        ("stop", "stop_sequences"),
        ("stop[1]", "stop_sequences[1]"),
        ("reasoning_effort", "output_config.effort"),
        ("nvext.max_thinking_tokens", "thinking.budget_tokens"),
        ("stop_conditions.max_thinking_tokens.args.start", "thinking.budget_tokens"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_errors_of_the_chat_name_the_field(param: str | None, expected: str | None) -> None:
    paths = made(
        system="s",
        messages=[*CALLED, {"role": "user", "content": [RESULT]}],
        tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": 5},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        logits_processors=[{"name": "min_tokens"}],
    ).paths
    problem = "is bad" if param is None else f"{param}: is bad"
    renamed = paths.renamed(Refused(429, problem, param, kind="k", code="c", headers=b"h"))
    assert (renamed.param, renamed.message) == (expected, "is bad" if param is None else f"{expected}: is bad")
    assert (renamed.status, renamed.kind, renamed.code, renamed.headers) == (429, "k", "c", b"h")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "input", "id"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(TABLE[MESSAGES])), JSON, max_size=6))
@settings(max_examples=examples(1000), deadline=None)
def test_any_request_is_a_chat_or_refused_by_name(fields: dict[str, Any]) -> None:
    blamed = None
    try:
        translated({**BASE, **fields}, models_think=True)
    except FieldRefused as refused:
        blamed = refused.param
    assert blamed is None or re.split(r"[.\[]", blamed)[0] in {*fields, "nvext"}
