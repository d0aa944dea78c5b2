"""The tables of the Responses API have all that the installed client knows, as the document has."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types import ReasoningEffort
from openai.types import responses as types
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_audio_param,
    response_input_item_param,
    tool_param,
)

from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.responses import fields as tables
from worker.frontdoor.responses.checks import EFFORTS
from worker.frontdoor.responses.fields import INPUT_TOKENS, OWN, PASSED_ON, RESPONSES
from worker.frontdoor.responses.kinds import FORMATS, INCLUDES, ITEMS, PARTS, TOOL_CHOICES, TOOLS, Kind


def literals_of(annotation: Any, key: str = "type") -> Iterator[str]:
    """The values of ``key`` of each type of a union of dicts, or of a union of literals."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        yield from (each for each in typing.get_args(annotation) if isinstance(each, str))
    elif hasattr(annotation, "__required_keys__"):
        yield from literals_of(typing.get_type_hints(annotation)[key])
    else:
        for each in typing.get_args(annotation):
            yield from literals_of(each, key)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        (RESPONSES, response_create_params.ResponseCreateParamsStreaming),
        (INPUT_TOKENS, input_token_count_params.InputTokenCountParams),
    ],
)
def test_every_field_of_openai_has_a_row(path: str, params: type) -> None:
    rows = {row.name for row in OWN if path in row.paths} | set(PASSED_ON)
    assert set(typing.get_type_hints(params)) <= rows


@pytest.mark.parametrize(
    ("table", "annotation"),
    [
        (ITEMS, response_input_item_param.ResponseInputItemParam),
        (TOOLS, tool_param.ToolParam),
        (TOOL_CHOICES, response_create_params.ToolChoice),
        (INCLUDES, types.ResponseIncludable),
        (FORMATS, types.ResponseFormatTextConfigParam),
        (PARTS, types.ResponseInputContentParam),
        (PARTS, response_input_audio_param.ResponseInputAudioParam),
        (PARTS, types.ResponseOutputTextParam | types.ResponseOutputRefusalParam),
    ],
    ids=["items", "tools", "choices", "includes", "formats", "parts", "audio", "output"],
)
def test_every_kind_of_openai_has_a_row(table: Mapping[str, Kind], annotation: Any) -> None:
    found = set(literals_of(annotation))
    assert found
    assert found <= set(table)


def keys_of(annotation: Any, name: str) -> set[str]:
    """The fields of the type whose ``type`` is ``name``."""
    found: set[str] = set()
    for each in typing.get_args(annotation):
        if name in literals_of(each):
            found |= set(typing.get_type_hints(each))
    return found


@pytest.mark.parametrize(
    ("table", "annotation"),
    [
        (ITEMS, response_input_item_param.ResponseInputItemParam),
        (TOOLS, tool_param.ToolParam),
        (PARTS, types.ResponseInputContentParam),
    ],
    ids=["items", "tools", "parts"],
)
def test_every_field_of_a_kind_is_known(table: Mapping[str, Kind], annotation: Any) -> None:
    for kind in table.values():
        if kind.fate != "refused":
            assert keys_of(annotation, kind.name) <= set(kind.keys), kind.name


def rows_of(section: str) -> list[tuple[str, ...]]:
    """The rows of a table of the document, without the names of its columns."""
    text = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
    (found,) = re.findall(rf"<!-- {section} -->\n\n(.*?)\n\n<!-- /{section} -->", text, re.DOTALL)
    return [tuple(line.strip("| ").split(" | ")) for line in found.split("\n")[2:]]


@pytest.mark.parametrize(
    ("section", "table"),
    [
        ("items", ITEMS),
        ("parts", PARTS),
        ("tools", TOOLS),
        ("choices", TOOL_CHOICES),
        ("includes", INCLUDES),
        ("formats", FORMATS),
    ],
)
def test_the_document_shows_the_kinds(section: str, table: Mapping[str, Kind]) -> None:
    assert rows_of(section) == [(f"`{kind.name}`", kind.fate, kind.why) for kind in table.values()]


def test_the_document_shows_the_fields() -> None:
    where = {(RESPONSES,): "responses", (INPUT_TOKENS,): "input_tokens", (RESPONSES, INPUT_TOKENS): "both"}
    assert rows_of("fields") == [(f"`{row.name}`", where[row.paths], row.fate, row.why) for row in OWN]


def test_chat_s_further_fields_are_those_of_responses_too() -> None:
    elsewhere = {row.name for row in OWN} | set(tables.INSTEAD) | set(tables.ABSENT)
    assert set(TABLES[CHAT]) - elsewhere == set(PASSED_ON)
    assert {"top_k", "seed", "stop", "logits_processors", "nvext", "logit_bias"} <= set(PASSED_ON)


def test_efforts_are_openai_s() -> None:
    assert set(literals_of(ReasoningEffort)) == set(EFFORTS)
