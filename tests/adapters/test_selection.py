from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalog import (
    ANNOTATION,
    MAX_BYTES,
    METADATA_KEY,
    Requested,
    Selection,
    SelectionError,
    from_channels,
    parse_selection,
    shown,
)


def selection(*processors: object, **fields: object) -> str:
    return json.dumps({"version": 1, "processors": list(processors), **fields})


def refused(text: str) -> SelectionError:
    with pytest.raises(SelectionError) as caught:
        parse_selection(text)
    return caught.value


def test_names_args_scope_and_receipt() -> None:
    text = selection(
        {"name": "min_tokens", "args": {"n": 8, "scope": "answer"}}, {"name": "acme/house_style"}, receipt="debug"
    )
    assert parse_selection(text) == Selection(
        (
            Requested("min_tokens", {"n": 8}, "answer", "processors[0]"),
            Requested("acme/house_style", {}, "all", "processors[1]"),
        ),
        "debug",
    )


def test_processors_and_receipt_may_be_absent() -> None:
    assert parse_selection('{"version": 1}') == Selection()


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ("", "", "expected a JSON object"),
        ("[]", "", "expected a JSON object"),
        ('{"version": 1', "", "not JSON"),
        ("{}", "version", "expected 1, got null"),
        ('{"version": 2}', "version", "got 2"),
        ('{"version": true}', "version", "got true"),
        ('{"version": 1.0}', "version", "got 1.0"),
        ('{"version": 1, "chain": []}', "", 'unknown field "chain"; known are version, processors, receipt'),
        ('{"version": 1, "processors": {}}', "processors", "expected a list"),
        ('{"version": 1, "processors": ["x"]}', "processors[0]", "expected an object"),
        ('{"version": 1, "receipt": 1}', "receipt", "got 1"),
        ('{"version": 1, "receipt": "full"}', "receipt", 'got "full"'),
        (selection({}), "processors[0].name", "got null"),
        (selection({"name": "Min"}), "processors[0].name", 'got "Min"'),
        (selection({"name": "a/b/c"}), "processors[0].name", "name"),
        (selection({"name": "min_tokens\n"}), "processors[0].name", "name"),
        (selection({"name": "os.system"}), "processors[0].name", "name"),
        (selection({"name": "a" * 65}), "processors[0].name", "name"),
        (selection({"name": "x", "scope": "all"}), "processors[0]", 'unknown field "scope"'),
        (selection({"name": "x"}, {"name": "x", "args": []}), "processors[1].args", "expected an object"),
        (selection({"name": "x", "args": {"scope": "prompt"}}), "processors[0].args.scope", "thinking"),
        (selection({"name": "x", "args": {"scope": []}}), "processors[0].args.scope", "expected one of"),
        (selection(*[{"name": "x"}] * 17), "processors", "at most 16, got 17"),
        ('{"version": 1, "version": 1}', "", 'the key "version" occurs twice'),
        (
            '{"version": 1, "processors": [{"name": "x", "args": {"a": {"k": 1, "k": 2}}}]}',
            "",
            'the key "k" occurs twice',
        ),
        ('{"version": NaN}', "", "NaN is not JSON"),
        ('{"version": 1, "processors": [{"name": "x", "args": {"a": -Infinity}}]}', "", "-Infinity"),
        ('{"version": 1, "processors": [{"name": "x", "args": {"a": 1e999}}]}', "", "out of range"),
        ('{"version": 1, "processors": [{"name": "x", "args": {"a": 1' + "0" * 400 + ".0}}]}", "", "out of range"),
        ('{"version": 1, "processors": [{"name": "x", "args": {"a": 18446744073709551616}}]}', "", "out of range"),
        ('{"version": 1' + "1" * 5000 + "}", "", "out of range"),
        (selection({"name": "x", "args": {"a": ["b", {"c": "\0"}]}}), "processors[0].args.a[1].c", "NUL"),
        (selection({"name": "x", "args": {"a": "\ud800"}}), "processors[0].args.a", "surrogate"),
        (selection({"name": "x", "args": {"\udfff": 1}}), "processors[0].args", "surrogate"),
        ('{"version": "\ud800"}', "", "not valid Unicode"),
        ('{"a":' * 13000, "", "nested"),
        ('{"a":' * 10000 + "1" + "}" * 5000, "", "nested"),
        ('{"version": 1}' + " " * MAX_BYTES, "", "at most 65536 bytes"),
        ('{"version": "' + "é" * 33000 + '"}', "", "at most 65536 bytes"),
    ],
)
def test_refusals_name_the_place(text: str, path: str, problem: str) -> None:
    error = refused(text)
    assert error.path == path
    assert problem in error.problem
    assert len(str(error)) < 400


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["-1", "128", "1.0", "true", '"1"', "null"])
def test_the_choice_is_a_number(value: str) -> None:
    assert parse_selection('{"version": 1, "choice": 127}').choice == 127
    assert parse_selection('{"version": 1}').choice == 0
    error = refused(f'{{"version": 1, "choice": {value}}}')
    assert (error.path, error.problem) == ("choice", f"expected an integer 0 to 127, got {value}")


@pytest.mark.parametrize("value", ["0", '"no"', "null"])
def test_speculation_is_true_or_false(value: str) -> None:
    assert not parse_selection('{"version": 1, "speculation": false}').speculation
    assert parse_selection('{"version": 1}').speculation
    error = refused(f'{{"version": 1, "speculation": {value}}}')
    assert (error.path, error.problem) == ("speculation", f"expected true or false, got {value}")


@pytest.mark.parametrize("value", ["0", "null", '["a"]', '"a\\u0000b"'])
def test_a_prediction_is_a_text(value: str) -> None:
    assert parse_selection('{"version": 1, "prediction": "def f():\\n"}').prediction == "def f():\n"
    assert parse_selection('{"version": 1}').prediction == ""
    assert refused(f'{{"version": 1, "prediction": {value}}}').path == "prediction"


def test_depth_32_is_the_last_one() -> None:
    # the outer object, the list, the entry and its args are four
    assert parse_selection(selection({"name": "x", "args": {"a": nested(28)}}))
    error = refused(selection({"name": "x", "args": {"a": nested(29)}}))
    assert error.problem == "is nested more than 32 deep"
    assert error.path == "processors[0].args.a" + "[0]" * 28


def test_integers_of_64_bits_pass() -> None:
    text = selection({"name": "x", "args": {"a": [2**64 - 1, -(2**63)]}})
    assert parse_selection(text).processors[0].args == {"a": [2**64 - 1, -(2**63)]}


def test_channels() -> None:
    text = selection({"name": "x"})
    expected = parse_selection(text)
    assert from_channels() is None
    assert from_channels(["other", "logits_processorsx"], {"logits-processor": text}) is None
    assert from_channels(["other", ANNOTATION + text], {"trace": "1"}) == expected
    assert from_channels([], {METADATA_KEY: text}) == expected
    for repeated, metadata in (([ANNOTATION + text] * 2, {}), ([ANNOTATION + text], {METADATA_KEY: text})):
        with pytest.raises(SelectionError, match="more than once"):
            from_channels(repeated, metadata)


def test_errors_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(SelectionError("processors[0].name", "expected a name")))
    assert (error.path, error.problem) == ("processors[0].name", "expected a name")


def test_shown_is_short() -> None:
    assert len(shown("x" * 5000)) < 80
    assert shown([1, 2]) == "list"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(categories=None)),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=20,
)
ENTRY = st.fixed_dictionaries(
    {}, optional={"name": st.sampled_from(["min_tokens", "a/b", "A", ""]) | JSON, "args": JSON}
)
SHAPED = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(1) | JSON,
        "processors": st.lists(ENTRY | JSON, max_size=18) | JSON,
        "receipt": st.booleans() | st.just("debug") | JSON,
        "other": JSON,
    },
)


def never_anything_else(text: str) -> None:
    outcome: Selection | SelectionError
    try:
        outcome = parse_selection(text)
    except SelectionError as error:
        outcome = error
    if isinstance(outcome, SelectionError):
        assert len(str(outcome).encode()) < 1000  # it travels in an HTTP reply
        return
    assert len(outcome.processors) <= 16
    args = [dict(requested.args) for requested in outcome.processors]
    json.dumps(args, ensure_ascii=False, allow_nan=False).encode()


@given(st.text(st.characters(categories=None)) | SHAPED.map(json.dumps))
def test_any_text_gives_a_selection_or_a_selection_error(text: str) -> None:
    never_anything_else(text)


@given(SHAPED, st.data())
def test_damaged_selections_parse_or_raise_a_selection_error(data: dict[str, Any], draw: st.DataObject) -> None:
    text = json.dumps(data, ensure_ascii=draw.draw(st.booleans()))
    start = draw.draw(st.integers(0, len(text)))
    stop = draw.draw(st.integers(start, min(len(text), start + 4)))
    never_anything_else(text[:start] + draw.draw(st.text(max_size=4)) + text[stop:])


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), st.sampled_from(["all", "thinking"])),
        max_size=16,
    ),
    st.sampled_from([False, True, "debug"]),
)
def test_what_is_written_is_read(named: list[tuple[str, str]], receipt: Any) -> None:
    text = selection(*({"name": n, "args": {"n": 1, "scope": s}} for n, s in named), receipt=receipt)
    parsed = parse_selection(text)
    assert [(r.name, r.scope, r.args) for r in parsed.processors] == [(n, s, {"n": 1}) for n, s in named]
    assert parsed.receipt == receipt
