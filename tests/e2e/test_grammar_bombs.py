"""Grammars that are made to hurt, through the frontend: refused, or answered, and the worker
goes on.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e_stack import DYNAMO, MODEL, Stack, Worker, wait_for
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


def rule_chain(length: int) -> str:
    return "\n".join(["start: r0", *(f'r{i}:"a" r{i + 1}' for i in range(length)), f'r{length}: "b"'])


def terminal_chain(length: int) -> str:
    return "\n".join(["start: T0", *(f'T{i}: "a" T{i + 1}' for i in range(length)), f'T{length}: "b"'])


def definitions_chain(length: int) -> Any:
    definitions: dict[str, Any] = {f"d{length}": {"type": "string"}}
    for i in range(length):
        definitions[f"d{i}"] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def multiple_of(number: int) -> dict[str, Any]:
    return {"guided_json": {"type": "integer", "multipleOf": 99999989 - 2 * number}}


STACK = "takes more than 2 MiB of stack to compile"
TIME = "takes more than 2 s of processor time to compile"
MEMORY = "takes more than 256 MiB of memory to compile"
ENUM = [f"value-{number:06d}" for number in range(200_000)]
REPEAT = "((a{1,200}){1,200}){1,200}"
TOO_DEEP = "exceed the maximum number of nested parentheses"

BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "nested schema": (of(processor("json_schema", schema=nested(60))), "is nested more than 32 deep"),
    "schema nested 1,700 times": (
        annotation('{"version":1,"processors":[{"name":"json_schema","args":{"schema":' + nested_text(1700) + "}}]}"),
        "is nested more than 32 deep",
    ),
    "schema as text nested 1,700 times": ({"guided_json": nested_text(1700)}, "guided_decoding"),
    "enum of 200,000": ({"guided_json": {"enum": ENUM}}, "args.schema: expected at most 1048576 characters"),
    "choice of 200,000": ({"guided_choice": ENUM}, "args.choices: list should have at most 4096 items"),
    "30,000 parentheses": (of(processor("regex", pattern=parentheses(30_000))), TOO_DEEP),
    "60,000 parentheses": ({"guided_regex": parentheses(60_000)}, TOO_DEEP),
    "60,000 parentheses in a schema": (
        {"guided_json": {"type": "string", "pattern": parentheses(60_000)}},
        "#/pattern: expected at most 4096 characters",
    ),
    "repeats of repeats": (of(processor("regex", pattern=REPEAT)), "too many expressions"),
    "repeats of repeats in Dynamo's field": ({"guided_regex": REPEAT}, "too many expressions"),
    "a schema that refers to itself": (
        of(processor("json_schema", schema={"$ref": "#"})),
        "refers to itself without an end",
    ),
    "chain of 3,000 rules": (of(processor("grammar", lark=rule_chain(3000))), STACK),
    "chain of 5,000 rules": ({"guided_grammar": rule_chain(5000)}, STACK),
    "chain of 20,000 terminals": ({"guided_grammar": terminal_chain(20_000)}, STACK),
    "chain of 5,000 definitions": ({"guided_json": definitions_chain(5000)}, STACK),
    "multiple of a large prime": (multiple_of(0), TIME),
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
    reply = chat(stack, **fields)
    if message == TIME and MEMORY in reply.text:  # a fast processor comes to this limit first
        message = MEMORY
    check_refused(reply, message)
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
        reply = chat(stack, max_tokens=40, **options, **HEAVY[name])  # type: ignore[arg-type]
        assert reply.status in (200, 400), reply.text
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"
    assert worker.running


@pytest.mark.campaign
def test_slow_grammars_starve_nobody(served: Shared) -> None:
    stack, worker = served
    alone = chat(stack, max_tokens=60, ignore_eos=True).token_ids
    with ThreadPoolExecutor(8) as pool:
        bombs = [pool.submit(chat, stack, **multiple_of(number)) for number in range(1, 9)]
        wait_for(lambda: worker.metric("dlw_grammars_running") > 0, "the first bomb")
        assert worker.metric("dlw_in_flight_requests") > 0
        for word in ("one", "two", "three"):
            assert chat(stack, processor("choice", choices=[word])).content == word
            assert chat(stack, max_tokens=60, ignore_eos=True).token_ids == alone
        statuses = {bomb.result().status for bomb in bombs}
    assert statuses <= {400, 529}
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "all freed")
    assert worker.metric("dlw_grammars_running") == worker.metric("dlw_grammars_waiting") == 0


def test_a_client_that_leaves_takes_its_grammar_along(served: Shared) -> None:
    stack, worker = served
    cancelled = worker.metric("dlw_grammars_total", outcome="cancelled")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    attempt = 0
    while worker.metric("dlw_grammars_total", outcome="cancelled") == cancelled:  # one may leave before it arrives
        attempt += 1
        with contextlib.suppress(httpx.TimeoutException):
            grammar = multiple_of(98 + attempt)
            httpx.post(f"{stack.url}/v1/chat/completions", json={**body, **grammar}, timeout=0.2 * (1 + attempt % 8))
        wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "all freed")


def test_a_sandbox_that_dies_is_replaced(served: Shared) -> None:
    stack, worker = served
    before = worker.metric("dlw_grammar_sandbox_restarts_total")
    (sandbox,) = worker.children("sandbox")
    sandbox.kill()
    assert chat(stack, processor("choice", choices=["alive"])).content == "alive"
    assert worker.metric("dlw_grammar_sandbox_restarts_total") == before + 1


def test_the_sandbox_ends_with_the_worker(stack: Stack) -> None:
    stack.start_frontend()
    for number, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
        worker = stack.start_worker("--device", "cpu", "--dtype", "float32")
        sandboxes = worker.children("sandbox")
        assert len(sandboxes) == 1
        worker.signal(number)
        assert worker.wait() == status
        assert not psutil.wait_procs(sandboxes, 60)[1]
