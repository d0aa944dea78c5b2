"""Grammars that take long, in a stock vLLM server with the middleware: others do not wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from stock_server import MODEL, client_of, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("served")) as url:
        yield url


def ask(url: str, schema: dict[str, Any] | None = None) -> str:
    extra = {}
    if schema is not None:
        processors = [{"name": "json_schema", "args": {"schema": schema}}]
        extra = {"vllm_xargs": {"logits_processors": json.dumps({"version": 1, "processors": processors})}}
    with client_of(url) as client:
        fields: dict[str, Any] = {"model": MODEL, "prompt": "Number:", "max_tokens": 16, "temperature": 0}
        return str(client.completions.create(**fields, extra_body=extra).choices[0].text)


def answers_meanwhile(url: str, schema: dict[str, Any]) -> tuple[str | openai.APIError, int]:
    """The answer to a schema, and the number of plain requests that were answered before it."""
    found: list[str | openai.APIError] = []

    def send() -> None:
        try:
            found.append(ask(url, schema))
        except openai.APIError as error:
            found.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    count = 0
    while sender.is_alive():
        ask(url)
        count += 1
    return found[0], count


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99999989},
        {"type": "array", "items": {"type": "integer", "multipleOf": 99999971}},
    ],
)
def test_a_bomb_is_refused_and_others_are_answered(server: str, schema: dict[str, Any]) -> None:
    answer, count = answers_meanwhile(server, schema)
    assert isinstance(answer, openai.BadRequestError)
    assert "logits_processors.processors[0].args.schema: takes more than" in answer.message
    assert count > 5


def test_a_slow_grammar_is_kept_and_others_are_answered(server: str) -> None:
    """It compiles for longer than a step may wait."""
    answer, count = answers_meanwhile(server, {"type": "integer", "minimum": 0, "multipleOf": 249989})
    assert isinstance(answer, str)
    assert answer.isdigit()
    assert count > 5
