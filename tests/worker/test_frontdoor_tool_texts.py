"""Tools, calls and results in the prompt of a model whose chat template does not write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.calls import FORMATS, NEUTRAL
from adapters.calls.detection import ToolSupport, tool_support
from adapters.calls.template import ChatTemplate
from worker.frontdoor.calls import CallArguments, CallBegin, CallParser
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.tool_texts import tools_text, write_tools_as_text

NOTHING = ToolSupport(format=NEUTRAL, evidence="a test")
WHOLE = replace(NOTHING, format="hermes", tools=True, calls=True, several=True, results=True)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER = {"role": "user", "content": "Is it warm in Paris?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ],
}
RESULTS: list[dict[str, Any]] = [
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    {
        "role": "tool",
        "tool_call_id": "call_2",
        "content": [{"type": "text", "text": each} for each in ("no", "on")],
    },
]
CALLS_TEXT = (
    '<tool_call>{"name": "weather", "arguments": {"city":"Paris"}}</tool_call>\n'
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
)
RESULTS_TEXT = "<tool_response>\nweather: 18 degrees\n</tool_response>\n<tool_response>\nclock: noon\n</tool_response>"


def written(support: ToolSupport, *messages: Any, choice: Any = None, **fields: Any) -> dict[str, Any]:
    """The fields that a chat becomes."""
    body: dict[str, Any] = json.loads(json.dumps({"messages": messages, **fields}))
    before = json.loads(json.dumps(body))
    changed = write_tools_as_text(body, support, choice)
    assert changed is (body != before)
    return body


def test_half_of_a_surrogate_pair_stays_an_escape() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\\ud83d"}'}}
    message = written(NOTHING, {"role": "assistant", "content": "", "tool_calls": [call]})["messages"][0]
    assert '{"city": "\\ud83d"}' in message["content"]


def test_tools_are_told_in_a_system_message() -> None:
    body = written(NOTHING, USER, tools=[WEATHER], parallel_tool_calls=True)
    system, user = body["messages"]
    assert set(body) == {"messages"}
    assert (system["role"], user) == ("system", USER)
    assert system["content"].splitlines() == [
        "You can call these functions:",
        json.dumps(WEATHER["function"]),
        "To call a function, write:",
        '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>',
    ]


@pytest.mark.parametrize(
    ("choice", "parallel", "line"),
    [
        ("required", None, "Call a function."),
        ({"type": "function", "function": {"name": "weather"}}, None, "Call weather."),
        ("auto", False, "Call one function at most."),
    ],
)
def test_what_must_be_called_is_told(choice: Any, parallel: bool | None, line: str) -> None:
    body = written(NOTHING, USER, choice=choice, tools=[WEATHER], parallel_tool_calls=parallel)
    assert body["messages"][0]["content"].splitlines()[-1] == line


def test_tools_that_may_not_be_called_are_not_told() -> None:
    assert written(NOTHING, USER, choice="none", tools=[WEATHER], tool_choice="none") == {"messages": [USER]}


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_told_how_to_call_in_each_format(name: str) -> None:
    text = tools_text({"tools": [WEATHER]}, FORMATS[name])
    assert all(part in text for part in ("NAME", "ARGUMENT", "VALUE", FORMATS[name].name_suffix.replace("#", "0")))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_clients_system_message_stays(role: str) -> None:
    for content in ("Be kind.", [{"type": "text", "text": "Be kind."}], "", None):
        body = written(NOTHING, {"role": role, "content": content}, USER, tools=[WEATHER])
        system, user = body["messages"]
        told = written(NOTHING, USER, tools=[WEATHER])["messages"][0]["content"]
        if isinstance(content, list):
            assert system == {"role": role, "content": [*content, {"type": "text", "text": told}]}
        else:
            assert system == {"role": role, "content": f"{content}\n\n{told}" if content else told}
        assert user == USER


@pytest.mark.parametrize("content", ["Hello", [{"type": "text", "text": "Hello"}]])
def test_without_a_system_message_the_first_user_is_told(content: Any) -> None:
    body = written(replace(NOTHING, system=False), {"role": "user", "content": content}, tools=[WEATHER])
    (user,) = body["messages"]
    told = written(NOTHING, USER, tools=[WEATHER])["messages"][0]["content"]
    expected = f"{told}\n\nHello" if isinstance(content, str) else [{"type": "text", "text": told}, *content]
    assert user == {"role": "user", "content": expected}


def test_calls_and_results_become_text() -> None:
    body = written(NOTHING, USER, CALLED, *RESULTS)
    assert body["messages"] == [
        USER,
        {"role": "assistant", "content": CALLS_TEXT},
        {"role": "user", "content": RESULTS_TEXT},
    ]
    said = written(NOTHING, USER, {**CALLED, "content": "I look."}, *RESULTS, {"role": "user", "content": "And?"})
    assert said["messages"][1:] == [
        {"role": "assistant", "content": f"I look.\n{CALLS_TEXT}"},
        {"role": "user", "content": f"{RESULTS_TEXT}\n\nAnd?"},
    ]
    for text in ("I look.\n", "\n\nI look. ", " \n"):
        own = written(NOTHING, USER, {**CALLED, "content": text}, *RESULTS)["messages"][1]
        assert own["content"] == text + CALLS_TEXT, "an answer of the model comes back as it was"
    answered = written(NOTHING, USER, CALLED, *RESULTS, {"role": "assistant", "content": "Yes.", "tool_calls": None})
    assert answered["messages"][-1] == {"role": "assistant", "content": "Yes."}


def test_a_chat_that_the_template_writes_stays() -> None:
    assert written(WHOLE, USER, CALLED, *RESULTS, tools=[WEATHER])["messages"] == [USER, CALLED, *RESULTS]
    assert written(NOTHING, USER)["messages"] == [USER]


def test_a_template_with_tools_and_without_results() -> None:
    """Its own format is that of the text."""
    body = written(replace(WHOLE, results=False), USER, CALLED, *RESULTS, tools=[WEATHER])
    assert body["tools"] == [WEATHER]
    assert body["messages"][1]["content"].startswith('<tool_call>\n{"name": "weather", "arguments": {"city":"Paris"}}')
    assert body["messages"][2] == {"role": "user", "content": RESULTS_TEXT}


def test_a_template_of_one_call_at_a_time() -> None:
    """Each message had the thinking, which a template then shows as often as there are calls."""
    said = {"content": "I look.", "reasoning_content": "Hm."}
    body = written(replace(WHOLE, several=False), USER, {**CALLED, **said}, *RESULTS, USER)
    first, second = CALLED["tool_calls"]
    assert body["messages"] == [
        USER,
        {"role": "assistant", **said, "tool_calls": [first]},
        RESULTS[0],
        {"role": "assistant", "content": "", "tool_calls": [second]},
        RESULTS[1],
        USER,
    ]
    unknown = {"role": "tool", "tool_call_id": "other", "content": "x"}
    assert written(replace(WHOLE, several=False), CALLED, unknown)["messages"][-1] == unknown


def test_a_template_of_short_ids() -> None:
    body = written(replace(WHOLE, short_ids=True), USER, CALLED, *RESULTS)
    ids = [call["id"] for call in body["messages"][1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in body["messages"][2:]]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len(set(ids)) == 2
    short = {**RESULTS[0], "tool_call_id": "abcdefgh9"}
    assert written(replace(WHOLE, short_ids=True), short)["messages"] == [short]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": 3}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "tool_call_id": "a", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "name": "f", "content": [{"type": "image"}]}, "messages[1].content"),
        ({"role": "tool", "name": "f", "content": 3}, "messages[1].content"),
    ],
)
def test_a_call_or_result_that_cannot_be_written_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldRefused) as refused:
        written(NOTHING, USER, message)
    assert refused.value.param == param


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "warm", "{" * 100_000])
def test_arguments_of_a_call_that_was_cut_are_written(arguments: str) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    *_, last = written(NOTHING, USER, {"role": "assistant", "tool_calls": [call]})["messages"]
    assert last["content"] == f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("fields", "choice"),
    [({"messages": 3}, None), ({"messages": [3]}, None), ({"messages": []}, 3), ({"parallel_tool_calls": 1}, None)],
)
def test_odd_types_are_left_to_the_frontend(fields: dict[str, Any], choice: Any) -> None:
    body = {"messages": [USER], "tools": [WEATHER], **fields}
    assert write_tools_as_text(body, NOTHING, choice) is False
    assert body["tools"] == [WEATHER]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(st.sampled_from(["weather", "clock"]), st.dictionaries(st.text(max_size=4), JSON, max_size=3))
CHATML = Path(__file__).parents[1] / "adapters" / "calls" / "templates" / "chatml.jinja"


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(CALL, min_size=1, max_size=4))
def test_a_call_in_the_prompt_is_what_the_model_would_write(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """The parser of answers reads the same calls out of it."""
    template = ChatTemplate({"default": CHATML.read_text()}, {})
    support = tool_support(template)
    given_calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"R{call['id']}."} for call in given_calls]
    body = written(support, USER, {"role": "assistant", "content": "", "tool_calls": given_calls}, *results)
    parser = CallParser(FORMATS[support.format], {"weather": {}, "clock": {}})
    pieces = [*parser.feed(body["messages"][1]["content"]), *parser.end()]
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert list(zip(names, arguments, strict=True)) == calls
    assert len(pieces) == 2 * len(calls)
    prompt = template.render(body["messages"])
    assert all(f": R{call['id']}." in prompt for call in given_calls)


def test_a_template_that_writes_ids_for_names_gets_them() -> None:
    """Kimi's: calls are counted from the first one of the chat on; an id of no call stays."""
    kimi = replace(WHOLE, format="kimi_k2", named_ids=True)
    later = {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": "call_9"}]}
    stray = {"role": "tool", "tool_call_id": "call_8", "content": "none"}
    answer = {**RESULTS[0], "tool_call_id": "call_9"}
    found = written(kimi, USER, CALLED, *RESULTS, later, answer, stray, tools=[WEATHER])["messages"]
    called = [call["id"] for message in found for call in message.get("tool_calls", ())]
    assert called == ["functions.weather:0", "functions.clock:1", "functions.weather:2"]
    assert [message["tool_call_id"] for message in found if message["role"] == "tool"] == [*called, "call_8"]
    with pytest.raises(FieldRefused, match=r"messages\[0\].tool_calls\[0\].function"):
        written(kimi, {"role": "assistant", "tool_calls": [{"id": "a"}]}, tools=[WEATHER])
