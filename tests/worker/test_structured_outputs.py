"""vLLM's ``structured_outputs`` at chats and completions is the guide of the same name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rewritten_requests import rewritten

from adapters.catalog import Catalog
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT, COMPLETIONS, TABLES
from worker.frontdoor.requests import names_of

CATALOG = Catalog.default()
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"model": "m", "prompt": "Hello"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json": {"type": "array"}}, {"guided_json": {"type": "array"}}),
    ({"json": '{"type": "array"}'}, {"guided_json": '{"type": "array"}'}),
    ({"regex": "a+"}, {"guided_regex": "a+"}),
    ({"choice": ["a", "b"]}, {"guided_choice": ["a", "b"]}),
    ({"grammar": 'start: "a"'}, {"guided_grammar": 'start: "a"'}),
    ({"json_object": True}, {"guided_json": {"type": "object"}}),
    ({"regex": "a+", "json": None, "json_object": False, "whitespace_pattern": None}, {"guided_regex": "a+"}),
    ({"json": {"type": "array"}, "disable_any_whitespace": True}, {"guided_json": {"type": "array"}}),
    ({"regex": "a+", "disable_any_whitespace": False, "whitespace_pattern": ""}, {"guided_regex": "a+"}),
    ({"regex": "a+", "disable_additional_properties": False}, {"guided_regex": "a+"}),
]


def sent(path: str, *, carries_guides: bool = False, **fields: Any) -> Any:
    body = json.dumps({**BASE[path], **fields}).encode()
    (only,) = rewritten(path, body, {}, CATALOG, carries_guides=carries_guides)
    return json.loads(only)


@pytest.mark.parametrize("carries_guides", [False, True])
@pytest.mark.parametrize("path", TABLES)
@pytest.mark.parametrize(("given", "guide"), SAME)
def test_it_is_the_guide(path: str, given: dict[str, Any], guide: dict[str, Any], carries_guides: bool) -> None:
    expected = sent(path, **guide, seed=1, carries_guides=carries_guides)
    assert sent(path, structured_outputs=given, seed=1, carries_guides=carries_guides) == expected
    assert sent(path, structured_outputs=given, **guide, seed=1, carries_guides=carries_guides) == expected


def properties(*names: str) -> dict[str, Any]:
    """A schema whose answers have these keys in this order."""
    return {"properties": dict.fromkeys(names, True), "required": [*names]}


JSON = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "beside", "param"),
    [
        ({}, {}, "structured_outputs"),
        ({"regex": None, "json_object": False}, {}, "structured_outputs"),
        ("a+", {}, "structured_outputs"),
        ({"regex": "a+", "choice": ["a"]}, {}, "structured_outputs"),
        ({"regexp": "a+"}, {}, "structured_outputs.regexp"),
        ({"regex": ""}, {}, "structured_outputs.regex"),
        ({"regex": 5}, {}, "structured_outputs.regex"),
        ({"json": [5]}, {}, "structured_outputs.json"),
        ({"choice": []}, {}, "structured_outputs.choice"),
        ({"choice": ["a", 5]}, {}, "structured_outputs.choice[1]"),
        ({"json_object": 1}, {}, "structured_outputs.json_object"),
        ({"structural_tag": "{}"}, {}, "structured_outputs.structural_tag"),
        ({"json": {}, "whitespace_pattern": " "}, {}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_additional_properties": True}, {}, "structured_outputs.disable_additional_properties"),
        ({"json": {}, "disable_any_whitespace": 1}, {}, "structured_outputs.disable_any_whitespace"),
        ({"regex": "a+"}, {"guided_regex": "b+"}, "structured_outputs.regex"),
        ({"json": {"const": True}}, {"guided_json": {"const": 1}}, "structured_outputs.json"),
        ({"json": properties("a", "b")}, {"guided_json": properties("b", "a")}, "structured_outputs.json"),
        ({"regex": "a+"}, {"guided_json": {}}, "structured_outputs.regex"),
        ({"regex": "a+"}, {"response_format": JSON}, "structured_outputs.regex"),
        ({"json_object": True}, {"tools": [TOOL], "tool_choice": "required"}, "structured_outputs.json_object"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(given: Any, beside: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        sent(CHAT, structured_outputs=given, **beside)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("carries_guides", [False, True])
def test_an_error_of_the_worker_goes_by_its_name(carries_guides: bool) -> None:
    fields = {**BASE[COMPLETIONS], "structured_outputs": {"regex": "("}}
    name = names_of(COMPLETIONS, fields, {}, carries_guides=carries_guides)
    path = "logits_processors.processors[0].args.pattern" if carries_guides else "sampling_options.guided_decoding"
    assert name(path) == "structured_outputs.regex"
    assert "structured_outputs" in fields
