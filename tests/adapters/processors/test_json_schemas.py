"""Grammars of JSON Schemas against an independent validator."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from effort import examples
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import extend
from schema_strategies import schemas, values
from schema_texts import Writer
from test_grammar import BYTES

from adapters.contract import ArgumentError
from adapters.processors.grammar import JsonSchema

Validator: Any = extend(Draft202012Validator, {"dependencies": Draft7Validator.VALIDATORS["dependencies"]})
"""``dependencies`` went from the last draft, not from the schemas that are sent."""


def writer_of(schema: Any, **args: Any) -> Writer | None:
    """The writer of a schema, None if it is refused by its path."""
    try:
        return Writer(JsonSchema, BYTES, schema=schema, **args)
    except ArgumentError as error:
        assert error.argument == "schema"
        assert error.problem.startswith("#"), error
        return None


def is_valid(schema: Any, value: Any) -> bool:
    try:
        return bool(Validator(schema).is_valid(value))
    except RecursionError:
        assume(False)
        raise


@settings(max_examples=examples(400), deadline=None)
@given(schemas(), st.lists(values, min_size=8, max_size=8))
def test_a_value_can_be_written_exactly_if_it_is_valid(schema: Any, candidates: list[Any]):
    writer = writer_of(schema)
    event("refused" if writer is None else "enforced")
    if writer is not None:
        for value in candidates:
            assert writer.writes_value(value) == is_valid(schema, value), value


@settings(max_examples=examples(200), deadline=None)
@given(schemas(), st.randoms(use_true_random=False))
def test_every_text_of_the_grammar_is_valid(schema: Any, chooser: random.Random):
    writer = writer_of(schema)
    if writer is not None:
        for length in (0, 20, 60):
            text = writer.walk(chooser, length)
            if text is not None:
                assert is_valid(schema, json.loads(text)), text
