"""Errors of Dynamo's frontend name the client's field, whatever the frontend says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from growth import peak_bytes

from worker.frontdoor.fields import CHAT
from worker.frontdoor.frontend_errors import error_of, field_in, shortened

_BODY = "Failed to deserialize the JSON body into the target type: "


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Temperature must be between 0 and 2, got 9", "temperature: Temperature must be between 0 and 2, got 9"),
        ("`bad_words_token_ids` must be an array", "bad_words_token_ids: must be an array"),
        ("Unsupported parameter(s): `no_stop_trim`", "no_stop_trim: Unsupported parameter(s): `no_stop_trim`"),
        ("The 'messages' field cannot be empty.", "messages: The 'messages' field cannot be empty."),
        ("Something else must be so", "Validation: Something else must be so"),
    ],
)
def test_a_message_begins_with_the_field(said: str, message: str) -> None:
    """Anthropic's form of an error has no other place for it."""
    body = json.dumps({"message": f"Validation: {said}", "code": 400}).encode()
    assert error_of(400, body).message == message


CONTEXT = "this model's maximum context length is 8 tokens"


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"message": f"{CONTEXT.capitalize()}. However, you requested 9 tokens.", "code": 400}, None),
        ({"error": {"message": f"token_ids: prompt is too long: 9 tokens, and {CONTEXT}"}}, "token_ids"),
    ],
    ids=["frontend", "worker"],
)
def test_a_prompt_beyond_the_context_has_the_code(said: dict[str, Any], field: str | None) -> None:
    """Clients that see it ask again with less."""
    error = error_of(400, json.dumps(said).encode())
    assert error.code == error.renamed("messages").code == "context_length_exceeded"
    assert error.param == field
    assert (field or field_in(error.message, CHAT, {})) == (field or "messages")
    assert "prompt is too long: " in error.message
    assert "maximum context length" in error.message


@pytest.mark.parametrize(
    ("said", "fields", "field"),
    [
        ("invalid type: floating point `-0.0`, expected i64 at line 1", {"temperature": 1, "seed": 0}, "seed"),
        ("invalid type: floating point `-0.0`, expected i64 at line 1", {"temperature": 0, "seed": 0}, None),
        ("invalid type: boolean `false`, expected i64 at line 1", {"seed": 0, "top_k": False}, "top_k"),
    ],
)
def test_a_value_leads_to_its_field(said: str, fields: dict[str, Any], field: str | None) -> None:
    assert field_in(_BODY + said, CHAT, fields) == field


@pytest.mark.parametrize("quote", ["`", '"'])
def test_a_long_value_is_shown_in_part(quote: str) -> None:
    message = f"unknown variant {quote}{'q' * 300_000}{quote}, expected one of `none`, `low`"
    cut = shortened(message)
    assert cut == f"unknown variant {quote}{'q' * 57}...{quote}, expected one of `none`, `low`"
    assert shortened(cut) == cut


def test_what_stands_between_values_is_shown() -> None:
    message = f"`a` {'must be one of the following ' * 9} `b`"
    assert shortened(message) == message


@pytest.mark.parametrize("said", ["recursion limit exceeded", "number out of range", "invalid type: integer `7`"])
def test_a_long_path_is_not_written_for_each_value(said: str) -> None:
    value: Any = [0] * 10_000
    for _ in range(100):
        value = {"k" * 60: value}
    assert peak_bytes(lambda: field_in(_BODY + said, CHAT, {"messages": [value]})) < 5_000_000
