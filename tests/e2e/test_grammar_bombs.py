"""Grammars that are made to hurt, through the frontend: refused, or answered, and the worker goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_stack import DYNAMO, MODEL, Stack, Worker
from processor_requests import annotation, chat, check_refused, of, serving

from adapters.client import processor

Shared = tuple[Stack, Worker]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Shared]:
    with serving(tmp_path_factory.mktemp("served"), tiny_model) as running:
        yield running


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def nested_text(depth: int) -> str:
    """As `nested`, where json.dumps would give up."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def parentheses(count: int) -> str:
    return "(" * count + "a" + ")" * count


ENUM = [f"value-{number:06d}" for number in range(200_000)]
REPEAT = "((a{1,200}){1,200}){1,200}"
TOO_DEEP = "exceed the maximum number of nested parentheses"

BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "nested schema": (of(processor("json_schema", schema=nested(60))), "is nested more than 16 deep"),
    "schema nested 1,700 times": (
        annotation('{"version":1,"processors":[{"name":"json_schema","args":{"schema":' + nested_text(1700) + "}}]}"),
        "is nested more than 16 deep",
    ),
    "schema as text nested 1,700 times": ({"guided_json": nested_text(1700)}, "guided_decoding"),
    "enum of 200,000": ({"guided_json": {"enum": ENUM}}, "args.schema: expected at most 1048576 characters"),
    "choice of 200,000": ({"guided_choice": ENUM}, "args.choices: list should have at most 4096 items"),
    "30,000 parentheses": (of(processor("regex", pattern=parentheses(30_000))), TOO_DEEP),
    "60,000 parentheses": ({"guided_regex": parentheses(60_000)}, TOO_DEEP),
    "60,000 parentheses in a schema": (
        {"guided_json": {"type": "string", "pattern": parentheses(60_000)}},
        TOO_DEEP,
    ),
    "repeats of repeats": (of(processor("regex", pattern=REPEAT)), "too many expressions"),
    "repeats of repeats in Dynamo's field": ({"guided_regex": REPEAT}, "too many expressions"),
    "a schema that refers to itself": (of(processor("json_schema", schema={"$ref": "#"})), "no text matches it"),
    "30,000 parentheses in a grammar": (
        of(processor("grammar", lark="start: " + parentheses(30_000).replace("a", '"a"'))),
        "too deeply nested",
    ),
}


def doubling(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{levels}": {"type": "null"}}
    for level in range(levels):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = {"type": "object", "properties": {"a": below, "b": below}, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


KEYS = [{"type": "object", "properties": {f"k{i}": {"type": "string"}}, "required": [f"k{i}"]} for i in range(2000)]
HEAVY: dict[str, dict[str, Any]] = {
    "a million letters": of(processor("regex", pattern="a{1,1000000}")),
    "ambiguous regex": of(processor("regex", pattern="(a|aa|aaa)*" * 40 + "b")),
    "repeats of repeats in a schema": {"guided_json": {"type": "string", "pattern": REPEAT}},
    "anyOf of 2,000 objects": {"guided_json": {"anyOf": KEYS}},
    "doubling references": of(processor("json_schema", schema=doubling(25))),
    "left recursion": of(processor("grammar", lark='start: start "a" | "a"')),
    "ambiguous grammar": of(processor("grammar", lark='start: a*\na: "a" | "aa" | a a')),
}
"""Within llguidance's limits: answered, or failed alone."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_bomb_is_refused(served: Shared, name: str) -> None:
    stack, worker = served
    fields, message = BOMBS[name]
    check_refused(chat(stack, **fields), message)
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"
    assert worker.running


@pytest.mark.parametrize("depth", [5_000, 50_000])
def test_bombs_that_the_frontend_stops(served: Shared, depth: int) -> None:
    stack, worker = served
    before = worker.metric("dlw_requests_total")
    head = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4})
    status, _ = raw(stack, f'{head[:-1]}, "guided_json": {nested_text(depth)}}}')
    assert status == 400
    grammar = "start: " + parentheses(depth).replace("a", '"a"')
    assert chat(stack, guided_grammar=grammar).status == (500 if DYNAMO < (1, 6) else 400)
    assert worker.metric("dlw_requests_total") == before


def raw(stack: Stack, body: str) -> tuple[int, str]:
    content = {"content-type": "application/json"}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", content=body.encode(), headers=content, timeout=60)
    return answer.status_code, answer.text


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_grammar_hurts_nobody(served: Shared, name: str) -> None:
    stack, worker = served
    for options in ({}, {"temperature": 1.5, "seed": 1}):
        reply = chat(stack, max_tokens=40, **options, **HEAVY[name])
        assert reply.status in (200, 400), reply.text
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"
    assert worker.running
