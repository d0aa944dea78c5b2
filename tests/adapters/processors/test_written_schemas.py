"""Schemas of the kinds that clients send: which are enforced, and that they are so exactly."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from jsonschema import FormatChecker
from jsonschema.validators import validator_for
from schema_texts import Writer
from test_json_schemas import BYTES
from written_schemas import EXAMPLES

from adapters.contract import ArgumentError
from adapters.processors.grammar import JsonSchema

ENFORCED = [name for name, example in EXAMPLES.items() if not example.refused]


def validator(schema: Any) -> Any:
    return validator_for(schema, default=jsonschema.Draft202012Validator)(
        schema, format_checker=FormatChecker(["date"])
    )


@pytest.mark.parametrize("name", ENFORCED)
def test_its_values_can_be_written_and_no_others(name: str) -> None:
    example = EXAMPLES[name]
    writer = Writer(JsonSchema, BYTES, schema=example.schema)
    flexible = Writer(JsonSchema, BYTES, schema=example.schema, compact=False)
    with_fractions = "draft-04" not in example.schema.get("$schema", "")
    for value in example.valid:
        assert writer.writes_value(value), value
        assert flexible.writes_value(value, fractions=with_fractions), value
    for value in example.invalid:
        assert not writer.writes_value(value), value
        assert not flexible.writes_value(value), value


@pytest.mark.parametrize("name", ENFORCED)
def test_its_texts_are_valid(name: str) -> None:
    schema = EXAMPLES[name].schema
    writer, check = Writer(JsonSchema, BYTES, schema=schema), validator(schema)
    for seed in range(8):
        text = writer.walk(random.Random(seed), 30 * seed)
        if text is not None:
            check.validate(json.loads(text))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ENFORCED])
def test_what_cannot_be_enforced_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Writer(JsonSchema, BYTES, schema=EXAMPLES[name].schema)
    assert caught.value.problem.startswith(EXAMPLES[name].refused), caught.value.problem


RESOURCES = ["pod-v1", "deployment-apps-v1", "service-v1", "ingress-networking-v1", "job-batch-v1"]
_REFERENCE = re.compile(r'"[^"]*_definitions\.json(#/(?:\$defs|definitions)/[^"]+)"')


@lru_cache(1)
def published() -> tuple[Path, dict[str, Any]]:
    folder = max(Path(kubernetes_validate.__file__).parent.glob("kubernetes-json-schema/v*-local"))
    definitions = json.loads((folder / "_definitions.json").read_text())
    return folder, definitions.get("$defs") or definitions["definitions"]


def bundled(name: str) -> dict[str, Any]:
    """A published schema with what it refers to, as one document."""
    folder, definitions = published()
    schema, needed = (folder / f"{name}.json").read_text(), dict[str, str]()
    waiting = [schema]
    while waiting:
        for pointer in re.findall(r'#/(?:\$defs|definitions)/([^"]+)"', waiting.pop()):
            if pointer not in needed:
                needed[pointer] = json.dumps(definitions[pointer])
                waiting.append(needed[pointer])
    text = ", ".join(f"{json.dumps(pointer)}: {each}" for pointer, each in needed.items())
    found = f'{{"$defs": {{{text}}}, "root": {schema}}}'
    found = _REFERENCE.sub(r'"\1"', found).replace('"#/definitions/', '"#/$defs/')
    document = json.loads(found)
    return {**document["root"], "$defs": document["$defs"]}


@pytest.mark.parametrize("name", RESOURCES)
def test_resources_of_kubernetes_are_enforced(name: str) -> None:
    schema = bundled(name)
    writer, check = Writer(JsonSchema, BYTES, schema=schema), validator(schema)
    for seed in range(4):
        text = writer.walk(random.Random(seed), 200 * seed)
        if text is not None:
            check.validate(json.loads(text))
