"""The column of docs/openengine.md that says which controls of a client arrive at a worker that the
front door asks itself: each row of it, asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine_doors import CHAT, COMPLETIONS, HELLO, door
from openengine_workers import running

DOCUMENT = Path(__file__).parents[2] / "docs" / "openengine.md"
COLUMN = "front door, `--upstream grpc://`"
BASE: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 1.0, "seed": 3}
TO_D: dict[str, Any] = {"logit_bias": {"40": 100}}
"""Makes every token a ``D``."""

FORCED = '{"version":1,"processors":[{"name":"forced_prefix","args":{"text":"Yes"}}]}'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": {"a": 1}}}}

Check = Callable[[Any, Any], bool]
"""Whether an answer shows what was asked for; the other one is that without it."""


def text(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def changes(answer: Any, plain: Any) -> bool:
    return text(answer) != text(plain)


def says(expected: str) -> Check:
    return lambda answer, plain: text(answer) == expected


def refuses(param: str) -> Check:
    return lambda answer, plain: answer["error"]["param"] == param


def num_tokens(count: int) -> Check:
    return lambda answer, plain: answer["usage"]["completion_tokens"] == count


def tells(field: str, count: int) -> Check:
    return lambda answer, plain: len(answer["nvext"][field]) == count


def trains(answer: Any, plain: Any) -> bool:
    """Whether the numbers for a trainer are those of tokens with almost the whole probability."""
    found = answer["choices"][0]["train_logprobs"]
    return set(found) == {"raw", "tempered", "processed", "log_mass"} and max(map(abs, found["processed"])) < 1e-6


def thought(answer: Any, plain: Any) -> bool:
    """Whether thinking has ended, which it does by its budget alone."""
    return "</think>" in text(answer) and "</think>" not in text(plain)


THINKS: dict[str, Any] = {"logits_processors": [{"name": "forced_prefix", "args": {"text": "<think>"}}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PICTURED = [{"role": "user", "content": [PICTURE]}]
SALTED: dict[str, Any] = {"messages": [{"role": "user", "content": "salt " * 40}], "max_tokens": 1}
ROWS: dict[str, list[tuple[str, dict[str, Any], Check]]] = {
    "temperature": [
        ("temperature", {"temperature": 2.0}, changes),
        ("top_p", {"top_p": 1e-6}, changes),
        ("top_k", {"top_k": 1}, changes),
        ("min_p", {"min_p": 1.0}, changes),
        ("penalties", {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}, changes),
        ("seed", {"seed": 4}, changes),
        ("max_tokens", {"max_tokens": 3}, num_tokens(3)),
        ("min_tokens", {"logit_bias": {"4": 100}, "min_tokens": 9}, num_tokens(9)),
        ("ignore_eos", {"logit_bias": {"4": 100}, "ignore_eos": True}, num_tokens(12)),
        ("stop", {**TO_D, "stop": ["DDD"]}, says("")),
        ("stop_token_ids", {**TO_D, "stop_token_ids": [40]}, says("")),
        ("logprobs", {"logprobs": True}, lambda answer, _: len(answer["choices"][0]["logprobs"]["content"]) == 12),
    ],
    "`response_format`": [
        ("response_format", {"response_format": SCHEMA}, says('{"a":1}')),
        ("guided_json", {"guided_json": {"const": 5}}, says("5")),
        ("guided_regex", {"guided_regex": "ab"}, says("ab")),
        ("guided_grammar", {"guided_grammar": 'start: "ab"'}, says("ab")),
    ],
    "`guided_choice`": [("guided_choice", {"guided_choice": ["ab"]}, says("ab"))],
    "`n`": [("n", {"n": 3}, lambda answer, _: len({text({"choices": [one]}) for one in answer["choices"]}) == 3)],
    "`include_stop_str_in_output`": [
        ("include_stop", {**TO_D, "stop": ["DDD"], "include_stop_str_in_output": True}, says("DDD")),
        ("thinking_token_budget", {**THINKS, "thinking_token_budget": 2}, thought),
        ("max_thinking_tokens", {**THINKS, "nvext": {"max_thinking_tokens": 2}}, thought),
        ("cache salts", {**SALTED, "cache_salt": "mine"}, lambda answer, _: cached(answer) == 0),
        ("no salt", SALTED, lambda answer, _: cached(answer) > 0),
        ("prompt_logprobs", {"prompt_logprobs": 1}, lambda answer, _: len(answer["prompt_logprobs"]) == 13),
        ("priorities", {"nvext": {"agent_hints": {"priority": 1}}}, refuses("nvext.agent_hints.priority")),
    ],
    # the engine here serves text; test_openengine_pictures.py shows them to one that sees
    "pictures": [("image_url", {"messages": PICTURED}, refuses("messages[0].content[0]"))],
    "`logit_bias`": [
        ("logit_bias", TO_D, says("D" * 12)),
        ("allowed_token_ids", {"allowed_token_ids": [40]}, says("D" * 12)),
        (
            "bad_words_token_ids",
            {**TO_D, "bad_words_token_ids": [[40, 40]]},
            lambda answer, _: "DD" not in text(answer),
        ),
    ],
    "logits processors": [
        ("annotations", {"nvext": {"annotations": [f"logits_processors:{FORCED}"]}}, changes),
        ("receipts", {"logits_processors": {"receipt": True}}, lambda answer, _: "engine_data" in answer["nvext"]),
    ],
    "the reason of a refusal": [
        ("reason", {"top_p": 7}, refuses("top_p")),
    ],
    "`return_token_ids`": [
        ("ids of tokens", {"return_token_ids": True}, lambda answer, _: len(answer["choices"][0]["token_ids"]) == 12),
        ("ids in nvext", {"nvext": {"extra_fields": ["completion_token_ids"]}}, tells("completion_token_ids", 12)),
        ("ids of the prompt", {"nvext": {"extra_fields": ["prompt_token_ids"]}}, tells("prompt_token_ids", 13)),
        ("a trainer's", {"logprobs_mode": "train", **TO_D}, trains),
    ],
    "[migration]": [],  # tests/runtimes/test_engine_upstream.py
}
"""By the beginning of a row: a name, fields, and what shows in the answer."""


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_each_row_is_asked() -> None:
    lines = DOCUMENT.read_text().partition("## What survives which path")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    place = rows[0].index(COLUMN)
    assert all(row[place].startswith("yes") for row in rows[2:])
    for row, beginning in zip(rows[2:], ROWS, strict=True):
        assert row[0].startswith(beginning)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running(tiny_model) as worker, door(tiny_model, f"grpc://127.0.0.1:{worker.port}") as client:
        await client.post(CHAT, json={**BASE, **SALTED})
        yield client


ASKED = [each for row in ROWS.values() for each in row]


@pytest.mark.parametrize(("fields", "check"), [each[1:] for each in ASKED], ids=[each[0] for each in ASKED])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_control_arrives(client: httpx.AsyncClient, fields: dict[str, Any], check: Check) -> None:
    without = {
        name: fields[name]
        for name in ("logit_bias", "logits_processors", "messages")
        if name in fields and len(fields) > 1
    }
    plain = (await client.post(CHAT, json={**BASE, **without})).json()
    answer = (await client.post(CHAT, json={**BASE, **fields})).json()
    assert check(answer, plain), answer


@pytest.mark.asyncio(loop_scope="module")
async def test_a_header_selects_processors(client: httpx.AsyncClient) -> None:
    headers = {"x-dynamo-meta-logits-processors": FORCED}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    assert (await client.post(COMPLETIONS, json=body, headers=headers)).json()["choices"][0]["text"].startswith("Yes")
