"""What the front door makes of a request's body."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from rewritten_requests import rewritten

from adapters.catalog import ANNOTATION, Catalog, parse_selection
from adapters.catalog.selection import MAX_BYTES
from worker.frontdoor import field_checks, requests
from worker.frontdoor.client_names import METADATA_HEADER
from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT, COMPLETIONS, FIELDS, TABLES
from worker.frontdoor.requests import names_of
from worker.frontdoor.returned_tokens import Returned
from worker.frontdoor.tool_reading import needs_chunks, tool_reading
from worker.frontdoor.tools import ToolCallSettings

CATALOG = Catalog.default()
MESSAGES = [{"role": "user", "content": "Hello"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": MESSAGES},
    COMPLETIONS: {"model": "m", "prompt": "Hello"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
MIN_TOKENS = {"name": "min_tokens", "args": {"n": 3}}


HERMES = ToolCallSettings("hermes")


def sent(
    path: str = CHAT, headers: dict[bytes, bytes] | None = None, calls: ToolCallSettings | None = None, **fields: Any
) -> Any:
    """What the frontend gets of a request with these fields beside the required ones."""
    body = json.dumps({**BASE[path], **fields}).encode()
    (only,) = rewritten(path, body, headers or {}, CATALOG, calls)
    return json.loads(only)


def refusal(
    path: str = CHAT, headers: dict[bytes, bytes] | None = None, calls: ToolCallSettings | None = None, **fields: Any
) -> Refused:
    with pytest.raises(Refused) as caught:
        sent(path, headers, calls, **fields)
    assert caught.value.status == 400
    assert caught.value.content()["error"]["param"] == caught.value.param
    return caught.value


def selected(body: Any) -> Any:
    (annotation,) = (text for text in body["nvext"]["annotations"] if text.startswith(ANNOTATION))
    parse_selection(annotation.removeprefix(ANNOTATION))
    return json.loads(annotation.removeprefix(ANNOTATION))


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openai_has_a_row(path: str, schema: type) -> None:
    assert {*schema.__annotations__, "stream"} <= set(TABLES[path])


def test_the_document_shows_the_table() -> None:
    """`docs/request.md` has exactly the rows of `FIELDS`; on failure, paste the left side."""
    document = (Path(__file__).parents[2] / "docs" / "request.md").read_text()
    shown = re.findall(r"^\| `(\S+)` \| (chat|completions|both) \| ([a-z ]+) \| (.*) \|$", document, re.MULTILINE)
    names = {(CHAT,): "chat", (COMPLETIONS,): "completions", (CHAT, COMPLETIONS): "both"}
    assert [(row.name, names[row.paths], row.fate, row.why) for row in FIELDS] == shown


@pytest.mark.parametrize("path", TABLES)
def test_a_body_with_nothing_to_change_stays_as_it_is(path: str) -> None:
    body = b'{ "temperature":0.50, "model":"m","stream" : true, ' + json.dumps(BASE[path]).encode()[1:].replace(
        b'"model": "m", ', b""
    )
    assert rewritten(path, body, {}, CATALOG)[0] is body


@pytest.mark.parametrize("path", TABLES)
def test_logit_bias_becomes_the_processor(path: str) -> None:
    body = sent(path, logit_bias={"5": 3, "7": -100.0}, seed=1)
    assert "logit_bias" not in body
    assert body["seed"] == 1
    (processor,) = selected(body)["processors"]
    assert processor == {"name": "logit_bias", "args": {"bias": {"5": 3, "7": -100.0}}}


@pytest.mark.parametrize("path", TABLES)
def test_processors_become_the_annotation(path: str) -> None:
    body = sent(path, logits_processors=[MIN_TOKENS], logit_bias={"5": 3})
    assert "logits_processors" not in body
    assert [each["name"] for each in selected(body)["processors"]] == ["min_tokens", "logit_bias"]


TAGS = {"type": "triggered_tags", "triggers": ["<a>"], "tags": []}
TAG = {"begin": "<a>", "end": "</a>"}


@pytest.mark.parametrize(
    "wanted",
    [
        {"format": {**TAGS, "tags": [{**TAG, "content": {"type": "regex", "pattern": "a"}}]}},
        {"structures": [{**TAG, "schema": {}}], "triggers": ["<a>"]},
    ],
)
def test_a_structural_tag_becomes_the_processor(wanted: Any) -> None:
    body = sent(response_format={"type": "structural_tag", **wanted}, seed=1)
    assert "response_format" not in body
    (processor,) = selected(body)["processors"]
    assert processor["name"] == "structural_tag"
    assert processor["args"]["format"]["tags"][0]["begin"] == "<a>"


NAMED = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
ENTRY = {"type": "function", "function": {"name": "g"}}


def allowing(allowed: Any) -> dict[str, Any]:
    return {"tools": [TOOL, OTHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {"choice": "auto"}, {}),
    "null": ({"tool_choice": None, "parallel_tool_calls": None}, {"choice": "auto"}, {}),
    "none": ({"tool_choice": "none"}, {"choice": "none"}, {"tool_choice": "none"}),
    "required": ({"tool_choice": "required"}, {"choice": "required"}, {"tool_choice": "auto"}),
    "named": (
        {"tool_choice": NAMED},
        {"choice": "required", "tool": "f", "parallel": False},
        {"tool_choice": "auto"},
    ),
    "named, several": (
        {"tool_choice": NAMED, "parallel_tool_calls": True},
        {"choice": "required", "tool": "f"},
        {"tool_choice": "auto"},
    ),
    "one at a time": ({"parallel_tool_calls": False}, {"choice": "auto", "parallel": False}, {}),
    "json": (
        {"response_format": SCHEMA},
        {"answer": {"type": "json_schema", "json_schema": {"type": "object"}}},
        {},
    ),
    "any json": (
        {"response_format": {"type": "json_object"}},
        {"answer": {"type": "json_schema", "json_schema": {"type": "object"}}},
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_tools_become_the_processor(name: str) -> None:
    """The frontend gets no forced call any more, for which it would have a schema of its own."""
    fields, expected, kept = CALLS[name]
    body = sent(calls=HERMES, tools=[TOOL, OTHER], logit_bias={"5": 1}, **fields)
    first, second = selected(body)["processors"]
    assert (first["name"], second["name"]) == ("logit_bias", "tool_calls")
    args = {"parallel": True, "format": "hermes", "choice": "auto", **expected}
    assert {key: value for key, value in second["args"].items() if key != "tools"} == args
    assert [each["name"] for each in second["args"]["tools"]] == ["f", "g"]
    assert "response_format" not in body
    assert body["tools"] == [TOOL, OTHER]
    assert {key: value for key, value in body.items() if key == "tool_choice"} == kept


FORCING: list[dict[str, Any]] = [
    {"tools": [TOOL, OTHER], "tool_choice": "required"},
    {"tools": [TOOL, OTHER], "tool_choice": NAMED},
    allowing({"mode": "required", "tools": [ENTRY]}),
]


@pytest.mark.parametrize("calls", [HERMES, None], ids=["format", "no format"])
@pytest.mark.parametrize("format_", [SCHEMA, {"type": "json_object"}], ids=["schema", "object"])
@pytest.mark.parametrize("fields", FORCING, ids=["required", "named", "allowed"])
def test_json_beside_a_forced_call_is_of_no_text(
    fields: dict[str, Any], format_: dict[str, Any], calls: ToolCallSettings | None
) -> None:
    """Agents whose answer has a schema send it with the turn that must call a tool, too."""
    given = {**fields, "response_format": format_}
    assert sent(calls=calls, **given) == sent(calls=calls, **fields)
    of_answer = tool_reading({**BASE[CHAT], **given}, calls)
    assert of_answer == tool_reading({**BASE[CHAT], **fields}, calls)
    if calls is None:  # the frontend's own schema of the call
        assert names_of(CHAT, {**BASE[CHAT], **given}, {})("sampling_options.guided_decoding") == "tools"


@pytest.mark.parametrize("name", ["hermes", "harmony", "functionary_v3_2"])
def test_json_without_calls_is_no_text_of_a_format(name: str) -> None:
    """Text of some formats has a beginning that no JSON has, so that no token was left."""
    body = sent(
        calls=ToolCallSettings(name), tools=[TOOL], tool_choice="none", response_format=SCHEMA, logit_bias={"5": 1}
    )
    assert [each["name"] for each in selected(body)["processors"]] == ["logit_bias"]
    assert body["response_format"] == SCHEMA
    assert (body["tools"], body["tool_choice"]) == ([TOOL], "none")


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("calls", [HERMES, None], ids=str)
def test_allowed_tools_are_the_only_ones(mode: str, calls: ToolCallSettings | None) -> None:
    fields = allowing({"mode": mode, "tools": [ENTRY]})
    body = sent(calls=calls, **fields)
    assert body["tools"] == [OTHER]
    if calls is None:
        assert body["tool_choice"] == mode
        return
    (processor,) = selected(body)["processors"]
    assert [each["name"] for each in processor["args"]["tools"]] == ["g"]
    assert processor["args"]["choice"] == mode
    reading = tool_reading({**BASE[CHAT], **fields}, calls)
    assert reading is not None
    assert (list(reading.tools), reading.only_calls) == (["g"], mode == "required")


def test_paths_are_those_among_all_tools() -> None:
    bad = {"type": "function", "function": {"name": "g", "parameters": 5}}
    found = refusal(calls=HERMES, **{**allowing({"mode": "auto", "tools": [ENTRY]}), "tools": [TOOL, bad]})
    assert str(found.param).startswith("tools[1].function.parameters")
    assert found.message.startswith(f"{found.param}: ")


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.sampled_from("abcd"), min_size=1), st.booleans())
def test_any_choice_of_tools_leaves_them_in_order(names: list[str], allowed: list[str], required: bool) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    listed = [{"type": "function", "function": {"name": name}} for name in allowed]
    choice = {"mode": "required" if required else "auto", "tools": listed}
    body = sent(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": choice})
    assert body["tools"] == [tool for tool in tools if tool in listed]
    assert body["tool_choice"] == choice["mode"]


def test_tools_of_a_model_that_thinks_bind_its_answer() -> None:
    (processor,) = selected(sent(calls=ToolCallSettings("mistral", "answer"), tools=[TOOL]))["processors"]
    assert processor["args"]["scope"] == "answer"
    assert processor["args"]["format"] == "mistral"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_a_frontend_with_a_parser_leaves_calls_as_text(choice: Any) -> None:
    """None keeps it from parsing the stream; the processor has the client's choice."""
    format = ToolCallSettings("hermes", frontend_parses=True)
    body = sent(calls=format, tools=[TOOL], tool_choice=choice)
    assert (body["tool_choice"], body["tools"]) == ("none", [TOOL])
    (processor,) = selected(body)["processors"]
    assert processor["args"]["choice"] == ("auto" if choice == "auto" else "required")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    """Without a format nothing keeps the model from a call."""
    assert not {"tools", "tool_choice"} & set(sent(tools=[TOOL], tool_choice="none"))


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    assert sent(calls=ToolCallSettings("mistral"), tools=[TOOL])["skip_special_tokens"] is False
    assert (
        sent(calls=ToolCallSettings("mistral"), tools=[TOOL], skip_special_tokens=True)["skip_special_tokens"] is False
    )
    assert "skip_special_tokens" not in sent(calls=ToolCallSettings("mistral"), tools=[TOOL], tool_choice="none")
    assert "skip_special_tokens" not in sent(calls=HERMES, tools=[TOOL])
    marked = ToolCallSettings("hermes", special_tokens=frozenset({"<tool_call>", "</s>"}))
    assert sent(calls=marked, tools=[TOOL])["skip_special_tokens"] is False


@pytest.mark.parametrize(
    ("fields", "calls", "parses", "expected"),
    [
        ({"tools": [TOOL]}, HERMES, False, True),
        ({"tools": [TOOL], "stream": True}, HERMES, False, True),
        ({"tools": [TOOL], "tool_choice": "none"}, HERMES, False, False),
        ({"tools": [TOOL], "tool_choice": "none"}, HERMES, True, True),
        ({"tools": [TOOL]}, None, True, False),
        ({"tools": [TOOL], "stream": "yes"}, HERMES, True, False),
        ({"tools": []}, HERMES, False, False),
        ({}, HERMES, True, True),
        ({"stream": True}, HERMES, True, False),
    ],
)
def test_which_chats_are_made_of_chunks(
    fields: dict[str, Any], calls: ToolCallSettings | None, parses: bool, expected: bool
) -> None:
    assert needs_chunks(fields, calls, parses=parses) is expected


def test_dynamo_s_version_says_whether_it_misreads() -> None:
    for version, expected in (("1.4.2", True), ("1.5.0rc1", True), ("1.6.1", False), ("2.0", False)):
        assert field_checks.is_before_1_6(version) is expected


def test_strict_tools_are_strict_with_a_format() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    (processor,) = selected(sent(calls=HERMES, tools=[strict]))["processors"]
    assert processor["args"]["tools"] == [{"name": "f", "parameters": {"type": "object"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [OTHER], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [OTHER], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [OTHER, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ],
)
def test_tools_that_cannot_be_enforced_are_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(calls=HERMES, **fields)
    assert error.param is not None
    assert error.param.startswith(param)


def test_tools_beside_a_selection_in_the_header() -> None:
    header = {METADATA_HEADER: b'{"version": 1}'}
    assert refusal(headers=header, calls=HERMES, tools=[TOOL]).param == "tools"
    assert sent(headers=header, tools=[TOOL])["tools"] == [TOOL]


def test_an_object_may_ask_for_receipt_deadline_and_order() -> None:
    wanted = {"processors": [MIN_TOKENS], "receipt": "debug", "deadline": 1.8e9, "order": ["min_p", "temperature"]}
    body = sent(
        logits_processors=wanted,
        nvext={"annotations": ["mine"], "extra_fields": ["timing"], "max_thinking_tokens": 4},
    )
    assert selected(body) == {"version": 1, **wanted}
    assert body["nvext"]["annotations"][0] == "mine"
    assert body["nvext"]["extra_fields"] == ["timing", "engine_data"]
    assert body["nvext"]["max_thinking_tokens"] == 4


def test_logit_bias_joins_an_annotation() -> None:
    annotation = ANNOTATION + json.dumps({"version": 1, "processors": [MIN_TOKENS], "receipt": True})
    body = sent(logit_bias={"5": 1}, nvext={"annotations": [annotation]})
    assert [each["name"] for each in selected(body)["processors"]] == ["min_tokens", "logit_bias"]
    assert selected(body)["receipt"] is True


def predicted(content: Any, **fields: Any) -> Any:
    """The selection that the worker gets for a chat with this prediction."""
    return selected(sent(prediction={"type": "content", "content": content}, **fields))


def test_a_prediction_is_part_of_the_selection() -> None:
    assert predicted("x = 1") == {"version": 1, "processors": [], "prediction": "x = 1"}
    assert predicted([{"type": "text", "text": part} for part in ("x ", "= 1")])["prediction"] == "x = 1"
    assert predicted("x", logits_processors=[MIN_TOKENS])["processors"] == [MIN_TOKENS]
    assert predicted("x", logits_processors={"prediction": "own"})["prediction"] == "own"
    nothing: tuple[Any, ...] = ("", [])
    for content in nothing:
        assert sent(prediction={"type": "content", "content": content}) == BASE[CHAT]
    header = {METADATA_HEADER: b'{"version": 1}'}
    assert sent(headers=header, prediction={"type": "content", "content": "x"}) == BASE[CHAT]
    assert refusal(prediction={"type": "content", "content": "a\0"}).param == "prediction.content"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9), st.integers(1, 20_000))
@settings(max_examples=examples(40))
def test_of_a_long_prediction_the_beginning_counts(text: str, times: int) -> None:
    """As much as a selection has room for, whatever it takes as JSON, and however many choices."""
    other = {"name": "logit_bias", "args": {"bias": {str(token): 1.5 for token in range(2000)}}}
    for fields in ({}, {"logits_processors": [other]}):
        body = {**BASE[CHAT], "n": 2, "prediction": {"type": "content", "content": text * times}, **fields}
        for one in rewritten(CHAT, json.dumps(body).encode(), {}, CATALOG):
            (annotation,) = json.loads(one)["nvext"]["annotations"]
            kept = parse_selection(annotation.partition(":")[2]).prediction
            assert (text * times).startswith(kept)
            assert kept == text * times or len(annotation) > 0.9 * MAX_BYTES


@pytest.mark.parametrize("path", TABLES)
def test_each_choice_is_a_request(path: str) -> None:
    """The first is as it would be alone; the others say in the selection which they are."""
    fields = {**BASE[path], "seed": 1, "logits_processors": {"processors": [MIN_TOKENS], "receipt": True, "choice": 2}}
    alone = sent(path, **fields)
    first, *others = (json.loads(one) for one in rewritten(path, json.dumps({**fields, "n": 3}).encode(), {}, CATALOG))
    assert first == alone
    for number, other in enumerate(others, start=3):
        assert selected(other) == {**selected(alone), "choice": number}
        other["nvext"]["annotations"] = alone["nvext"]["annotations"]
        assert other == alone
    bare = [json.loads(one) for one in rewritten(path, json.dumps({**BASE[path], "n": 2}).encode(), {}, CATALOG)]
    assert bare[0] == BASE[path]
    assert selected(bare[1]) == {"version": 1, "choice": 1}


def test_a_prompt_is_not_encoded_for_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices of 32 KB held the event loop up for 0.1 s."""
    num_bytes = 0

    def encode(fields: Any) -> bytes:
        nonlocal num_bytes
        text = encoded(fields)
        num_bytes += len(text)
        return text

    monkeypatch.setattr(requests, "encoded", encode)
    body = json.dumps({"model": "m", "prompt": [1] * 8000, "n": 128}).encode()
    bodies = rewritten(COMPLETIONS, body, {}, CATALOG)
    assert num_bytes < 4 * len(body)
    assert [json.loads(each)["prompt"] for each in bodies] == [[1] * 8000] * 128
    chosen = [selected(json.loads(each))["choice"] for each in bodies[1:]]
    assert chosen == list(range(1, 128))


def test_choices_that_cannot_be_told_apart() -> None:
    for fields, headers in (
        ({"logits_processors": {"choice": 127}}, {}),
        ({}, {METADATA_HEADER: b'{"version": 1}'}),
    ):
        with pytest.raises(Refused) as refused:
            rewritten(CHAT, json.dumps({**BASE[CHAT], "n": 2, **fields}).encode(), headers, CATALOG)
        assert refused.value.param == "n"


def test_an_annotation_alone_is_left_as_it_is() -> None:
    annotation = ANNOTATION + '{"version": 1,  "processors": []}'
    assert sent(nvext={"annotations": [annotation]})["nvext"] == {"annotations": [annotation]}


NOTHING: dict[str, tuple[str, Any]] = {
    "logit_bias": (CHAT, {}),
    "top_logprobs": (CHAT, 0),
    "logits_processors": (CHAT, []),
    "n": (CHAT, 1),
    "best_of": (COMPLETIONS, 1),
    "echo": (COMPLETIONS, False),
    "suffix": (COMPLETIONS, ""),
    "modalities": (CHAT, ["text"]),
    "audio": (CHAT, None),
    "store": (CHAT, False),
    "service_tier": (CHAT, "auto"),
    "function_call": (CHAT, "auto"),
    "functions": (CHAT, []),
    "verbosity": (CHAT, None),
    "web_search_options": (CHAT, None),
    "temperature": (CHAT, None),
    "stream_options": (CHAT, {"include_obfuscation": False}),
    "prompt_cache_key": (CHAT, "key"),
    "safety_identifier": (CHAT, "who"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_asks_for_nothing_is_taken_out(name: str) -> None:
    """Some of these the frontend would refuse."""
    path, value = NOTHING[name]
    assert sent(path, **{name: value}) == BASE[path]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"include_usage": None, "continuous_usage_stats": None}, None),
        ({"include_obfuscation": False, "include_usage": True}, {"include_usage": True}),
        ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}),
    ],
)
def test_options_of_a_stream_are_written_out(options: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """The frontend reads no null, and no options without `include_usage`; OpenAI's API does."""
    assert sent(CHAT, stream=True, stream_options=options).get("stream_options") == expected


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


def pictured(role: str = "user", **fields: Any) -> dict[str, Any]:
    """A chat with a picture."""
    return {"messages": [{"role": role, "content": [{**PICTURE, **fields}]}]}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": (CHAT, {"zzz": 1}, "zzz"),
    "unknown null": (CHAT, {"zzz": None}, "zzz"),
    "of another endpoint": (COMPLETIONS, {"messages": MESSAGES}, "messages"),
    "unprintable": (CHAT, {"a\nb": 1}, "a\\nb"),
    "suffix": (COMPLETIONS, {"suffix": "x"}, "suffix"),
    "modalities": (CHAT, {"modalities": ["text", "audio"], "audio": {"voice": "alloy"}}, "modalities"),
    "audio": (CHAT, {"audio": {"voice": "alloy"}}, "audio"),
    "web search": (CHAT, {"web_search_options": {}}, "web_search_options"),
    "n 129": (CHAT, {"n": 129}, "n"),
    "n true": (CHAT, {"n": True}, "n"),
    "n 0": (CHAT, {"n": 0}, "n"),
    "echo": (COMPLETIONS, {"echo": True}, "echo"),
    "store": (CHAT, {"store": True}, "store"),
    "service tier": (CHAT, {"service_tier": "flex"}, "service_tier"),
    "functions": (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    "top_logprobs alone": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "sound": (CHAT, pictured(type="input_audio"), "messages[0].content[0]"),
    "picture of the assistant": (CHAT, pictured("assistant"), "messages[0].content[0]"),
    "picture without a URL": (CHAT, pictured(image_url="data:,"), "messages[0].content[0].image_url"),
    "picture key": (CHAT, pictured(zzz=1), "messages[0].content[0].zzz"),
    "picture in picture": (CHAT, pictured(image_url={"url": "", "zzz": 1}), "messages[0].content[0].image_url.zzz"),
    "detail": (
        CHAT,
        pictured(image_url={"url": "data:,", "detail": "high"}),
        "messages[0].content[0].image_url.detail",
    ),
    "no parts": (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "message key": (CHAT, {"messages": [{"role": "user", "content": "a", "zzz": 1}]}, "messages[0].zzz"),
    "part key": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "zzz": 1}]}]},
        "messages[0].content[0].zzz",
    ),
    "assistant audio": (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
    "format": (CHAT, {"response_format": {"type": "zzz"}}, "response_format.type"),
    "format key": (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    "no schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
    ),
    "two guides": (CHAT, {"guided_json": {}, "guided_regex": "a"}, "guided_json"),
    "guide and format": (CHAT, {"guided_regex": "a", "response_format": SCHEMA}, "guided_regex"),
    "guide and tool": (CHAT, {"guided_regex": "a", "tools": [TOOL], "tool_choice": "required"}, "guided_regex"),
    "empty choice": (CHAT, {"guided_choice": []}, "guided_choice"),
    "white space": (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    "guide backend": (CHAT, {"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    "custom tool": (CHAT, {"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
    "tool key": (CHAT, {"tools": [{**TOOL, "zzz": 1}]}, "tools[0].zzz"),
    "strict tool": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict",
    ),
    "forced without tools": (CHAT, {"tool_choice": "required"}, "tool_choice"),
    "forced and formatted": (
        CHAT,
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "response_format": {"type": "structural_tag", "structures": [], "triggers": []},
        },
        "response_format",
    ),
    "structural tag": (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": {"type": "tag"}}},
        "response_format.format.type",
    ),
    "old structural tag": (
        CHAT,
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
        "response_format.tags",
    ),
    "choice's type": (CHAT, {"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type"),
    "allowed tools": (CHAT, allowing(None), "tool_choice.allowed_tools"),
    "Responses' allowed tools": (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.mode",
    ),
    "mode of allowed tools": (CHAT, allowing({"mode": "none", "tools": [ENTRY]}), "tool_choice.allowed_tools.mode"),
    "no tool allowed": (CHAT, allowing({"mode": "auto", "tools": []}), "tool_choice.allowed_tools.tools"),
    "a schema in an allowed tool": (
        CHAT,
        allowing({"mode": "auto", "tools": [OTHER]}),
        "tool_choice.allowed_tools.tools[0].function.parameters",
    ),
    "an unknown allowed tool": (
        CHAT,
        allowing({"mode": "required", "tools": [ENTRY, {"type": "function", "function": {"name": "h"}}]}),
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    "allowed tools of none": (
        CHAT,
        {**allowing({"mode": "auto", "tools": [ENTRY]}), "tools": []},
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    "allowed tools of no list": (CHAT, {**allowing({"mode": "auto", "tools": [ENTRY]}), "tools": 5}, "tools"),
    "allowed tools of one name": (
        CHAT,
        {**allowing({"mode": "auto", "tools": [ENTRY]}), "tools": [OTHER, TOOL, OTHER]},
        "tools[2].function.name",
    ),
    "one call at a time": (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    "obfuscation": (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    "stream option": (CHAT, {"stream_options": {"zzz": 1}}, "stream_options.zzz"),
    "stop and ignore_eos": (CHAT, {"stop": ["a"], "ignore_eos": True}, "stop"),
    "stop ids and ignore_eos": (CHAT, {"stop_token_ids": [5], "ignore_eos": True}, "stop_token_ids"),
    "raw prompt": (CHAT, {"nvext": {"use_raw_prompt": True}}, "nvext.use_raw_prompt"),
    "prompt logprobs": (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    "embeddings": (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    "bias key": (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
    "bias range": (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
    "bias list": (CHAT, {"logit_bias": [1]}, "logit_bias"),
    "processor": (CHAT, {"logits_processors": [{"name": "min_token"}]}, "logits_processors[0].name"),
    "argument": (
        CHAT,
        {"logits_processors": [MIN_TOKENS, {"name": "min_tokens", "args": {"n": -1, "scope": "answer"}}]},
        "logits_processors[1].args.n",
    ),
    "twice": (CHAT, {"logits_processors": [{"name": "dry"}, {"name": "dry"}]}, "logits_processors[1]"),
    "selection": (CHAT, {"logits_processors": {"zzz": 1}}, "logits_processors"),
    "selection text": (CHAT, {"logits_processors": "min_tokens"}, "logits_processors"),
    "receipt": (CHAT, {"logits_processors": {"receipt": 3}}, "logits_processors.receipt"),
    "order": (CHAT, {"logits_processors": {"order": ["temperature", "min_tokens"]}}, "logits_processors.order[1]"),
    "misspelt annotation": (CHAT, {"nvext": {"annotations": ["logits_procesors:{}"]}}, "nvext.annotations"),
    "two selections": (
        CHAT,
        {"logits_processors": [MIN_TOKENS], "nvext": {"annotations": [ANNOTATION + '{"version": 1}']}},
        "logits_processors",
    ),
    "nvext": (CHAT, {"logit_bias": {"5": 1}, "nvext": 3}, "nvext"),
    "two salts": (CHAT, {"cache_salt": "a", "nvext": {"cache_salt": "b"}}, "nvext.cache_salt"),
    "empty salt": (COMPLETIONS, {"cache_salt": ""}, "cache_salt"),
    "empty salt in nvext": (CHAT, {"nvext": {"cache_salt": ""}}, "nvext.cache_salt"),
    "two thinking budgets": (
        CHAT,
        {"thinking_token_budget": 4, "nvext": {"max_thinking_tokens": 5}},
        "nvext.max_thinking_tokens",
    ),
    "two prompts of ids": (COMPLETIONS, {"prompt": [5], "nvext": {"token_data": [6]}}, "nvext.token_data"),
}


def test_the_table_names_the_parts_that_are_taken() -> None:
    def is_taken(kind: str) -> bool:
        part = {"type": kind, "text": "a"} if kind == "text" else {"type": kind, kind: {"url": "data:,"}}
        try:
            sent(CHAT, messages=[{"role": "user", "content": [part]}])
        except Refused:
            return False
        return True

    (row,) = [each.why for each in TABLES[CHAT].values() if each.name == "messages"]
    for kind in ("text", "image_url", "input_audio", "video_url", "file", "refusal"):
        assert is_taken(kind) is bool(re.search(rf"\b{kind}\b", row)), kind


def test_pictures_go_on_as_they_are() -> None:
    content = [PICTURE, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": content}]
    assert sent(CHAT, messages=messages)["messages"] == messages


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_field(name: str) -> None:
    path, fields, param = REFUSED[name]
    error = refusal(path, **fields)
    assert error.param == param
    assert error.message.startswith(param)


def test_bad_annotations_or_headers_are_refused_before_a_stream() -> None:
    bad = json.dumps({"version": 1, "processors": [{"name": "min_tokens", "args": {"n": -1}}]})
    assert refusal(nvext={"annotations": [ANNOTATION + bad]}).param == "logits_processors.processors[0].args.n"
    assert "processors[0].args.n" in refusal(headers={METADATA_HEADER: bad.encode()}).message
    assert refusal(headers={METADATA_HEADER: b'{"version": 1}'}, logit_bias={"5": 1}).param == "logit_bias"
    forced = '{"version": 1, "processors": [{"name": "forced_prefix", "args": {"text": "\u00e9"}}]}'
    assert "must be ASCII" in refusal(headers={METADATA_HEADER: forced.encode()}).message


def test_more_stops_than_the_frontend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (field_checks.stop_limit("1.4.2"), field_checks.stop_limit("1.6.1"), field_checks.stop_limit("2.0.0")) == (
        4,
        None,
        None,
    )
    monkeypatch.setattr(field_checks, "MAX_STOPS", 4)
    for name, values in (("stop", ["a", "b", "c", "d", "e"]), ("stop_token_ids", [5, 6, 7, 8, 9])):
        assert refusal(**{name: values}).param == name  # type: ignore[arg-type]
        assert sent(**{name: values[:4]})[name] == values[:4]  # type: ignore[arg-type]


KEPT: dict[str, dict[str, Any]] = {
    "history": {
        "messages": [
            {"role": "system", "content": "d"},
            {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": "",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ]
    },
    "strict tool": {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}], "tool_choice": "required"},  # type: ignore[dict-item]
    "schema": {"response_format": SCHEMA, "stream": True, "stream_options": {"include_usage": True}},
    "one named tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_as_it_is(name: str) -> None:
    assert sent(**KEPT[name]) == {**BASE[CHAT], **KEPT[name]}


def test_what_a_client_parsed_of_an_answer_is_not_sent() -> None:
    """The openai package sends it back with the answer."""
    back = {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}}
    assert sent(messages=[*MESSAGES, back])["messages"] == [*MESSAGES, {"role": "assistant", "content": '{"a": 1}'}]


def test_a_developer_is_the_system_to_the_template() -> None:
    told = {"role": "developer", "content": "Be kind."}
    found = sent(messages=[told, *MESSAGES, told])["messages"]
    assert found == [{**told, "role": "system"}, *MESSAGES, {**told, "role": "system"}]


@pytest.mark.parametrize("path", TABLES)
def test_a_null_asks_for_nothing_and_is_not_sent_on(path: str) -> None:
    """Clients that encode a whole record of settings send those that are unset as null, which a
    frontend that does not know the field refuses.
    """
    names = [name for name in TABLES[path] if name not in BASE[path]]
    assert "structured_outputs" in names
    assert [name for name in names if sent(path, **{name: None}) != BASE[path]] == []


@pytest.mark.parametrize("path", TABLES)
def test_no_stop_strings_ask_for_nothing(path: str) -> None:
    """Evaluation harnesses send an empty list for a task without any."""
    assert sent(path, stop=[], seed=1) == {**BASE[path], "seed": 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_is_one_that_a_frontend_reads(path: str, seed: int) -> None:
    """Its integers of 64 bits have a sign."""
    found = sent(path, seed=seed)["seed"]
    assert -(2**63) <= found < 2**63
    assert found % 2**64 == seed % 2**64


@pytest.mark.parametrize("without", [{}, {"content": None}], ids=["absent", "null"])
def test_a_returned_tool_call_without_content_has_an_empty_text(without: dict[str, None]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = {"role": "tool", "tool_call_id": "1", "content": "r"}
    back = {"role": "assistant", "tool_calls": [call], **without}
    found = sent(messages=[*MESSAGES, back, answered, {"role": "assistant", "content": "a"}])
    assert found["messages"] == [*MESSAGES, {**back, "content": ""}, answered, {"role": "assistant", "content": "a"}]


def test_other_messages_without_content_are_left_to_the_frontend() -> None:
    messages = [{"role": "user", "content": None}, {"role": "system"}, {"role": "tool", "content": None}]
    assert sent(messages=messages)["messages"] == messages


MALFORMED = {
    "nothing": b"",
    "a list": b"[]",
    "half": b'{"model": "m"',
    "two": b"{}{}",
    "no UTF-8": b'{"model": "\xff"}',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "NaN": b'{"model": "m", "temperature": NaN}',
    "infinite": b'{"model": "m", "temperature": 1e999}',
    "a long integer": b'{"model": "m", "seed": ' + b"9" * 5000 + b"}",
    "deep": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "twice": b'{"model": "m", "messages": [], "logit_bias": {"5": 1}, "logit_bias": {}}',
    "twice, escaped": b'{"model": "m", "messages": [], "logit_bias": {"5": 1}, "logit_bi\\u0061s": {}}',
    "twice inside": b'{"model": "m", "messages": [], "logit_bias": {"5": 1, "5": 2}}',
    "half a surrogate pair": b'{"model": "m", "user": "\\ud800", "logit_bias": {"5": 1}}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies(name: str) -> None:
    with pytest.raises(Refused) as refused:
        rewritten(CHAT, MALFORMED[name], {}, CATALOG)
    assert refused.value.status == 400


@pytest.mark.parametrize("depth", [*range(20, 60, 5), *range(800, 1010, 3)])
def test_a_body_nested_almost_too_deep_is_refused_or_forwarded(depth: int) -> None:
    """It may still be too deep to write."""
    deep = '{"type": "function", "function": {"name": "f", "parameters": ' + '{"a": ' * depth + "1" + "}" * depth + "}}"
    for body in (
        '{"model": "m", "messages": [], "tools": [' + deep + "]}",
        '{"model": "m", "messages": [], "logit_bias": {"5": 1}, "metadata": ' + deep + "}",
    ):
        with contextlib.suppress(Refused):
            assert rewritten(CHAT, body.encode(), {}, CATALOG, HERMES)[0].startswith(b"{")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)


@given(path=st.sampled_from(sorted(TABLES)), calls=st.sampled_from([None, HERMES]), data=st.data())
def test_any_request_is_refused_or_sent_on(path: str, calls: ToolCallSettings | None, data: st.DataObject) -> None:
    """Nothing is lost: what is not sent on under its name is selected, or asked for nothing."""
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(TABLES[path])) | st.text(max_size=4), JSON, max_size=4))
    try:
        after = json.loads(rewritten(path, json.dumps(fields).encode(), {}, CATALOG, calls)[0])
    except Refused:
        return
    for name, value in fields.items():
        if after.get(name) != value and name not in ("nvext", "stream_options"):
            field = TABLES[path][name]
            assert field.asks_for_nothing(value) or field.removed or name in ("tool_choice", "response_format")
            if field.fate == "honoured":
                assert not value or "nvext" in after


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_sent_on(body: bytes) -> None:
    with contextlib.suppress(Refused):
        assert isinstance(json.loads(rewritten(CHAT, body, {}, CATALOG)[0]), dict)


GUIDES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"response_format": SCHEMA}, {"name": "json_schema", "args": {"schema": {"type": "object"}}}),
    (
        CHAT,
        {"response_format": {"type": "json_object"}},
        {"name": "json_schema", "args": {"schema": {"type": "object"}}},
    ),
    (CHAT, {"guided_json": {"type": "array"}}, {"name": "json_schema", "args": {"schema": {"type": "array"}}}),
    (CHAT, {"guided_json": '{"type": "array"}'}, {"name": "json_schema", "args": {"schema": {"type": "array"}}}),
    (COMPLETIONS, {"guided_regex": "a+"}, {"name": "regex", "args": {"pattern": "a+"}}),
    (COMPLETIONS, {"guided_choice": ["a", "b"]}, {"name": "choice", "args": {"choices": ["a", "b"]}}),
    (COMPLETIONS, {"guided_grammar": 'start: "a"'}, {"name": "grammar", "args": {"lark": 'start: "a"'}}),
]


@pytest.mark.parametrize(("path", "fields", "processor"), GUIDES)
def test_guides_become_processors_where_requests_migrate(
    path: str, fields: dict[str, Any], processor: dict[str, Any]
) -> None:
    given = {**BASE[path], **fields, "guided_decoding_backend": "auto", "logits_processors": [MIN_TOKENS]}
    body = json.loads(rewritten(path, json.dumps(given).encode(), {}, CATALOG, carries_guides=True)[0])
    assert selected(body)["processors"] == [MIN_TOKENS, processor]
    assert not {*fields, "guided_decoding_backend"} & set(body)


TAGGED: dict[str, Any] = {**TAGS, "tags": [{**TAG, "type": "tag", "content": {"type": "regex", "pattern": "a"}}]}
TAGGED |= {"at_least_one": False, "stop_after_first": False}
TAG_GUIDE: tuple[str, dict[str, Any], dict[str, Any]] = (
    CHAT,
    {"response_format": {"type": "structural_tag", "format": TAGGED}},
    {"name": "structural_tag", "args": {"format": TAGGED}},
)


@pytest.mark.parametrize(("path", "fields", "processor"), [*GUIDES, TAG_GUIDE])
def test_a_guide_and_its_processor_are_one_control(
    path: str, fields: dict[str, Any], processor: dict[str, Any]
) -> None:
    """Both were kept where requests migrate; without that the worker refuses them."""
    given = {**BASE[path], **fields, "logits_processors": [MIN_TOKENS, processor]}
    with pytest.raises(Refused, match="too; give one of them") as caught:
        rewritten(path, json.dumps(given).encode(), {}, CATALOG, carries_guides=True)
    assert str(caught.value.param).startswith(tuple(fields))


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"response_format": {"type": "text"}}),
        ({}, {"response_format": SCHEMA, "tools": [TOOL]}),
        ({}, {"guided_json": {"enum": ["x" * 40_000]}}),
        ({}, {"guided_json": '{"type": "array", "type": "object"}'}),
        ({METADATA_HEADER: b'{"version": 1, "processors": []}'}, {"response_format": SCHEMA}),
    ],
)
def test_a_guide_that_cannot_become_a_processor_stays(headers: dict[bytes, bytes], fields: dict[str, Any]) -> None:
    body = json.dumps({**BASE[CHAT], **fields}).encode()
    assert rewritten(CHAT, body, headers, CATALOG, carries_guides=True)[0] is body


def test_a_guide_that_is_refused_goes_by_its_own_name() -> None:
    body = json.dumps({**BASE[COMPLETIONS], "guided_choice": ["a", 5], "logit_bias": {"5": 1}}).encode()
    with pytest.raises(Refused) as caught:
        rewritten(COMPLETIONS, body, {}, CATALOG, carries_guides=True)
    assert str(caught.value.param).startswith("guided_choice")


@pytest.mark.parametrize("path", BASE)
def test_an_adapter_that_is_gone_is_the_model(path: str) -> None:
    """Unloaded behind the frontend, which still knows it as a model."""
    assert names_of(path, BASE[path], {})("routing.lora_name") == "model"


@pytest.mark.parametrize(
    ("fields", "path", "name"),
    [
        ({"allowed_token_ids": []}, "sampling_options.allowed_token_ids.args.token_ids", "allowed_token_ids"),
        (
            {"bad_words_token_ids": [[]]},
            "sampling_options.bad_words_token_ids.args.token_ids[0]",
            "bad_words_token_ids[0]",
        ),
        (
            {"nvext": {"max_thinking_tokens": -1}},
            "stop_conditions.max_thinking_tokens.args.start",
            "nvext.max_thinking_tokens",
        ),
    ],
)
def test_a_processors_argument_is_no_part_of_a_controls_name(fields: dict[str, Any], path: str, name: str) -> None:
    assert names_of(CHAT, {**BASE[CHAT], **fields}, {})(path) == name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_refused_annotation_is_the_field_that_it_was_made_of(path: str) -> None:
    trained = {**BASE[path], "logprobs_mode": "train"}
    own = {**BASE[path], "nvext": {"annotations": ["refusal_as_data"]}, "return_token_ids": True}
    for fields, name in ((trained, "logprobs_mode"), (own, "nvext.annotations")):
        assert names_of(path, Returned.of(fields).request(fields), {})("annotations") == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"nvext": {"max_thinking_tokens": 3}}, "logits_processors"),
        ({"logits_processors": [{"name": "phrase_ban", "args": {"phrases": ["a"]}}]}, "logits_processors"),
        ({"logits_processors": [{"name": "min_p", "args": {"p": 0.5}}], "logit_bias": {"5": 3}}, "logits_processors"),
    ],
)
def test_the_chain_that_an_engine_refuses_is_the_selection(fields: dict[str, Any], name: str) -> None:
    assert names_of(CHAT, {**BASE[CHAT], **fields}, {})("sampling_params.logits_processor") == name


@pytest.mark.parametrize("other", [{"tools": [TOOL]}, {"logit_bias": {"5": 1}}, {"min_p": 0.5}])
def test_an_unknown_key_of_a_selection_is_not_another_fields(other: dict[str, Any]) -> None:
    refused = refusal(calls=HERMES, logits_processors={"processors": [], "chain": []}, **other)
    assert refused.message.startswith('logits_processors: unknown field "chain"; known are version')


def test_a_schema_beside_tools_is_named_by_its_field() -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "response_format": SCHEMA}
    assert sent(calls=HERMES, **fields)
    named = names_of(CHAT, {**BASE[CHAT], **fields}, {}, HERMES)
    found = named("logits_processors.processors[0].args.answer.json_schema")
    assert found == "response_format.json_schema.schema"
