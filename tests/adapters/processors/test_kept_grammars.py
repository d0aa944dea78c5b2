"""Grammars' sources, made once for requests that send the same arguments."""

from __future__ import annotations

import json
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.catalog import Catalog, Requested, Selection
from adapters.contract import ArgumentError
from adapters.grammars import kept as kept_module
from adapters.grammars.json_schema import SchemaRefused, count_cases, limited
from adapters.grammars.kept import KeptGrammars
from adapters.processors.grammar import JsonSchema
from adapters.processors.tool_calls import ToolCalls
from adapters.testing.kit_model import kit_context

HARD = {"allOf": [{"enum": [f"v{i}" for i in range(40)]}, {"pattern": "^v[0-9]*$"}]}


def test_tools_that_come_again_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At admission, for each choice, and with each further turn of an agent."""
    made = Mock(wraps=ToolCalls.grammar)
    monkeypatch.setattr(ToolCalls, "grammar", made)
    context = kit_context()

    def ask(name: str, **more: Any) -> str:
        args = {"format": "hermes", "tools": [{"name": name}], **more}
        selection = Selection((Requested("tool_calls", args, path="processors[0]"),))
        ((_, grammar),) = Catalog.default().grammars(selection, context)
        (processor,) = [member.processor for member in Catalog.default().build_chain(selection, context).members]
        assert isinstance(processor, ToolCalls)
        assert processor.source == grammar
        return grammar

    first = ask("kept_once")
    assert ask("kept_once") == first
    assert made.call_count == 1
    assert len({first, ask("kept_twice"), ask("kept_once", parallel=False), ask("kept_once", choice="required")}) == 4
    assert made.call_count == 4


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_what_is_kept_is_bounded_and_the_same(lengths: list[int]) -> None:
    kept, made = KeptGrammars(), list[str]()

    def make(key: str) -> str:
        made.append(key)
        return f"{key} {'x' * int(key)}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_module, "MAX_KEPT", 100)
        patch.setattr(kept_module, "MAX_KEPT_EACH", 50)
        for length in lengths:
            key = str(length)
            for _ in range(2):
                assert kept.grammar(key, partial(make, key)) == f"{key} {'x' * length}"
            is_small = 2 * len(key) + 1 + length <= 50
            assert made[-2:] != [key, key] or not is_small
            assert kept.num_characters <= 100


def test_work_counts_whether_a_grammar_was_kept() -> None:
    kept = KeptGrammars()

    def make() -> str:
        count_cases(100)
        return "made"

    for _ in range(3):
        with limited(150) as work_done:
            assert kept.grammar("key", make) == "made"
        assert work_done() == 100
        with limited(99), pytest.raises(SchemaRefused, match="too many cases"):
            kept.grammar("key", make)


def test_a_kept_schema_is_refused_as_an_argument() -> None:
    """In a request whose other schemas have used up the work."""
    args = JsonSchema.Args.model_validate({"schema": {"properties": {"a": HARD}}})
    vocabulary = kit_context().vocabulary
    JsonSchema.kept_grammar(args, vocabulary)
    with pytest.raises(ArgumentError, match="too many cases") as raised, limited(10):
        JsonSchema.kept_grammar(args, vocabulary)
    assert raised.value.argument == "schema"


def test_a_large_grammar_is_not_kept() -> None:
    """The texts of hundreds of them would take a gigabyte of a worker's memory, for good."""
    kept, large = KeptGrammars(), "x" * kept_module.MAX_KEPT_EACH
    for text, number in (("small", 1), (large, 1), ("other", 2)):
        assert kept.grammar(json.dumps(text[:9]), lambda text=text: text) == text  # type: ignore[misc]
        assert len(kept) == number
