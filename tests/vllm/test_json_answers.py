"""Forty schemas on four models, sixteen streams at once: every answer is valid."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine import params, running, shared, tiny
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

SCALARS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None]},
    {"const": "fixed"},
    {"type": "integer", "minimum": -20, "maximum": 90},
    {"type": "string", "maxLength": 7},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "enum": ["é", "日本", '"quoted"']},
]
"""Schemas whose answers are short, whatever the model."""


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)[:-1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def either(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


PAIRS = list(zip(SCALARS, [*SCALARS[3:], *SCALARS[:3]], strict=True))
SCHEMAS = [
    *SCALARS,
    *(list_of(each) for each in SCALARS),
    *(record(a=one, b=other) for one, other in PAIRS),
    *(either(one, record(kind={"const": "other"}, value=other)) for one, other in PAIRS),
    *(record(head=one, tail=list_of(record(x=other, y={"type": "boolean"}))) for one, other in PAIRS),
]


def streamed(llm: LLM, asked: list[SamplingParams]) -> list[tuple[list[str], str | None]]:
    """Pieces of text of each answer, in order, and why it ended."""
    found: list[tuple[list[str], str | None]] = [([], None) for _ in asked]
    for number, each in enumerate(asked):
        each.output_kind = RequestOutputKind.DELTA
        llm.llm_engine.add_request(str(number), "Answer in JSON:", each)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            number, (delta,) = int(output.request_id), output.outputs
            found[number] = [*found[number][0], delta.text], delta.finish_reason
    return found


@pytest.mark.parametrize("name", ["default", "qwen3", "gemma3_text", "llama"])
def test_every_answer_is_valid(name: str, tmp_path: Path) -> None:
    assert len(SCHEMAS) == 40
    asked = [
        params(
            {"name": "json_schema", "args": {"schema": schema}},
            temperature=(0.0, 1.0)[number % 2],
            seed=(None, number)[number // 2 % 2],
            max_tokens=400,
        )
        for number, schema in enumerate(SCHEMAS)
    ]
    engine = nullcontext(shared()) if name == "default" else running(tiny(tmp_path, name))
    with engine as llm:
        answers = streamed(llm, asked)
    for schema, (pieces, finish_reason) in zip(SCHEMAS, answers, strict=True):
        assert finish_reason == "stop", (schema, pieces)
        jsonschema.validate(json.loads("".join(pieces)), schema)
    assert max(len(pieces) for pieces, _ in answers) > 8
