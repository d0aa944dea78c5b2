"""Tools through the front door: calls are held to their schemas, and come out as ``tool_calls``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, running_stack
from front_door_process import Door

MESSAGES = [{"role": "user", "content": "Hello there"}]
PARSER = ("--dyn-tool-call-parser", "hermes")


def tool(name: str, city: str, strict: bool = True) -> dict[str, Any]:
    city_schema = {"$ref": "#/$defs/city"}
    parameters = {
        "type": "object",
        "properties": {"where": {"type": "object", "properties": {"city": city_schema}, "required": ["city"]}},
        "required": ["where"],
        "additionalProperties": False,
        "$defs": {"city": {"const": city}},
    }
    parameters["properties"]["where"]["additionalProperties"] = False  # type: ignore[index]
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("weather", "Paris"), tool("weather_tomorrow", "Oslo")]
CITIES = {"weather": "Paris", "weather_tomorrow": "Oslo"}
BEGUN = {"logits_processors": [{"name": "forced_prefix", "args": {"text": "Yes. <tool_call>"}}]}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    with running_stack(tmp_path_factory.mktemp("tools"), tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--device", "cpu", "--dtype", "float32", *PARSER)
        yield Door(stack, "--", *PARSER)


def ask(door: Door, **fields: Any) -> dict[str, Any]:
    """The answer's only choice."""
    with door.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **{"max_tokens": 120, **fields})  # type: ignore[arg-type]
        (choice,) = answer.model_dump()["choices"]
        return choice  # type: ignore[no-any-return]


def calls_of(choice: dict[str, Any]) -> list[str]:
    """The names of the calls, whose arguments are right."""
    calls = choice["message"]["tool_calls"] or []
    for call in calls:
        name = call["function"]["name"]
        assert json.loads(call["function"]["arguments"]) == {"where": {"city": CITIES[name]}}
    return [call["function"]["name"] for call in calls]


def test_a_call_that_must_come(door: Door) -> None:
    choice = ask(door, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(choice)) == 1
    assert choice["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "weather_tomorrow"}}
    assert calls_of(ask(door, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)) == ["weather_tomorrow"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("name", list(CITIES))
def test_a_call_of_an_allowed_tool(door: Door, name: str) -> None:
    for mode, begun in (("required", {}), ("auto", BEGUN)):
        choice = ask(door, tools=TOOLS, tool_choice=allowed(mode, name), parallel_tool_calls=False, extra_body=begun)
        assert calls_of(choice) == [name]


def test_a_call_in_a_stream(door: Door) -> None:
    with door.client() as client:
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL,
            messages=MESSAGES,
            max_tokens=120,
            stream=True,
            tools=TOOLS,
            tool_choice=allowed("required", "weather_tomorrow"),
            parallel_tool_calls=False,
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    names = [call.function.name for call in calls if call.function and call.function.name]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert names == ["weather_tomorrow"]
    assert json.loads(arguments)["where"]["city"] == CITIES["weather_tomorrow"]
    assert "tool_call" not in "".join(delta.content or "" for delta in deltas)


def test_a_call_that_the_model_begins(door: Door) -> None:
    """Strict without a forced call: what follows the beginning of a call is one."""
    choice = ask(door, tools=TOOLS, parallel_tool_calls=False, extra_body=BEGUN)
    assert len(calls_of(choice)) == 1
    assert choice["message"]["content"].startswith("Yes.")
    status, text = door.post(
        "chat/completions", messages=MESSAGES, max_tokens=60, tools=TOOLS, tool_choice="none", **BEGUN
    )
    assert status != 200, text  # the forced text is a call, and there may be none


def test_a_call_or_json(door: Door) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": {"age": 3}}}}
    choice = ask(door, tools=TOOLS, response_format=wanted, parallel_tool_calls=False)
    assert calls_of(choice) or choice["message"]["content"] == '{"age":3}'
    for prefix, calls in (("{", 0), ("<tool_call>", 1)):
        begun = {"logits_processors": [{"name": "forced_prefix", "args": {"text": prefix}}]}
        choice = ask(door, tools=TOOLS, response_format=wanted, parallel_tool_calls=False, extra_body=begun)
        assert len(calls_of(choice)) == calls
        assert calls or choice["message"]["content"] == '{"age":3}'


def test_a_structural_tag(door: Door) -> None:
    tag = {"begin": "<city>", "content": {"type": "regex", "pattern": "Paris|Oslo"}, "end": "</city>"}
    wanted = {"type": "triggered_tags", "triggers": ["<city>"], "tags": [tag], "at_least_one": True}
    wanted["stop_after_first"] = True
    choice = ask(door, response_format={"type": "structural_tag", "format": wanted})
    assert choice["message"]["content"] in ("<city>Paris</city>", "<city>Oslo</city>")


def test_what_cannot_be_enforced_is_refused(door: Door) -> None:
    """The schema by the worker, which compiles it; the rest at the door."""
    bad = tool("weather", "Paris")
    bad["function"]["parameters"]["properties"]["where"] = {"type": "array", "uniqueItems": True}
    for fields, named in (
        ({"tools": [bad]}, "uniqueItems"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
    ):
        status, text = door.post("chat/completions", messages=MESSAGES, max_tokens=8, **fields)
        assert status == 400, text
        assert named in text


def test_a_json_answer_with_a_name_is_no_call(door: Door) -> None:
    """1.4.2's frontend alone would make one of it."""
    schema = {
        "type": "object",
        "properties": {"name": {"const": "Ann"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    assert json.loads(ask(door, response_format=wanted)["message"]["content"]) == {"name": "Ann"}
    with door.client() as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            response_format=wanted,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)  # type: ignore[union-attr]
    assert json.loads(text) == {"name": "Ann"}
