"""Grammars of JSON Schemas: exact, against an independent validator and against plain formulas."""

from __future__ import annotations

import contextlib
import json
import random
import re
from datetime import date
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from effort import examples
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import extend
from schema_strategies import NUMBERS, schemas, values
from schema_texts import Writer
from test_grammar import END, WIDTH, ByteTokenizer, ByteVocabulary

from adapters.contract import ArgumentError
from adapters.grammars.json_schema import SchemaRefused, lark_grammar
from adapters.grammars.json_schema.ecma import searched
from adapters.grammars.json_schema.ecma_characters import PatternError
from adapters.grammars.json_schema.formats import format_language
from adapters.grammars.json_schema.patterns import is_empty, matches
from adapters.processors.grammar import Grammar, JsonSchema
from adapters.processors.structural import StructuralTag
from adapters.processors.tool_calls import ToolCalls

Validator: Any = extend(Draft202012Validator, {"dependencies": Draft7Validator.VALIDATORS["dependencies"]})
"""``dependencies`` went from the last draft, not from the schemas that are sent."""

BIG = 2**53 + 1


class Bytes(ByteVocabulary):
    """One token for each byte, whose texts have one tokenisation."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = Bytes(WIDTH, ByteTokenizer(), [END])


def writer(schema: Any, **args: Any) -> Writer:
    return Writer(JsonSchema, BYTES, schema=schema, **args)


def enforced(schema: Any, **args: Any) -> Writer | ArgumentError:
    """The writer of a schema, or why it is refused."""
    try:
        return writer(schema, **args)
    except ArgumentError as error:
        return error


def is_valid(schema: Any, value: Any) -> bool:
    try:
        return bool(Validator(schema).is_valid(value))
    except RecursionError:
        assume(False)
        raise


@settings(max_examples=examples(400), deadline=None)
@given(schemas(), st.lists(values, min_size=8, max_size=8))
def test_a_value_can_be_written_exactly_if_it_is_valid(schema: Any, candidates: list[Any]) -> None:
    found = enforced(schema)
    event("enforced" if isinstance(found, Writer) else "refused")
    if isinstance(found, Writer):
        for value in candidates:
            assert found.writes_value(value) == is_valid(schema, value), value
    else:
        assert found.argument == "schema"
        assert found.problem.startswith("#")
        if "no JSON matches" in found.problem:
            assert not any(is_valid(schema, value) for value in candidates)


@settings(max_examples=examples(100), deadline=None)
@given(schemas(), st.lists(values, min_size=8, max_size=8))
def test_an_integer_may_have_a_fraction_unless_text_is_compact(schema: Any, candidates: list[Any]) -> None:
    found = enforced(schema, compact=False)
    if isinstance(found, Writer):
        for value in candidates:
            assert found.writes_value(value, fractions=True) == is_valid(schema, value), value


@settings(max_examples=examples(300), deadline=None)
@given(
    step=st.sampled_from([0.1, 0.3, 0.5, 0.75, 2.5, 3]),
    whole=st.sampled_from([{"type": "integer"}, {"multipleOf": 1}]),
    low=st.integers(-12, 12),
    length=st.integers(0, 8),
    factor=st.integers(-40, 40),
)
def test_multiples_that_are_no_integers_leave_integers_out(
    step: float, whole: Any, low: int, length: int, factor: int
) -> None:
    bounds = {"minimum": low / 4, "maximum": (low + length) / 4}
    found = enforced({"type": "number", "not": whole, "multipleOf": step, **bounds})
    multiples = [each * Fraction(str(step)) for each in (factor, *range(-40, 41))]
    valid = [each for each in multiples if low <= 4 * each <= low + length and each.denominator > 1]
    if isinstance(found, ArgumentError):
        assert not valid
        return
    for value in multiples:
        assert found.writes_value(float(value) if value.denominator > 1 else int(value)) == (value in valid), value


@settings(max_examples=examples(300), deadline=None)
@given(
    step=st.sampled_from(["0.5", "0.25", "0.125", "0.05", "0.04", "0.75", "0.15", "1.5", "2.25", "3", "0.001", "20"]),
    factor=st.integers(-40, 40),
    low=st.none() | st.integers(-6, 6),
    high=st.none() | st.integers(-6, 6),
    compact=st.booleans(),
)
def test_multiples_can_be_written_as_json_writes_them(
    step: str, factor: int, low: int | None, high: int | None, compact: bool
) -> None:
    """The shortest text of a multiple is allowed, with as many digits as it has."""
    bounds = {name: end for name, end in (("minimum", low), ("maximum", high)) if end is not None}
    found = enforced({"type": "number", "multipleOf": float(step), **bounds}, compact=compact)
    if isinstance(found, ArgumentError):
        assert low is not None
        assert high is not None
        return
    for value in (factor * Fraction(step), factor * Fraction(step) + Fraction(step) / 5):
        is_multiple = value == factor * Fraction(step)
        is_inside = (low is None or value >= low) and (high is None or value <= high)
        whole = float(value) if value.denominator > 1 else int(value)
        assert found.writes_value(whole) == (is_multiple and is_inside), value
        if not compact and value.denominator == 1:
            assert found.writes_value(whole, fractions=True) == (is_multiple and is_inside), value


@settings(max_examples=examples(150), deadline=None)
@given(schemas(), st.randoms(use_true_random=False), st.booleans())
def test_every_text_of_the_grammar_is_valid(schema: Any, chooser: random.Random, compact: bool) -> None:
    found = enforced(schema, compact=compact)
    if isinstance(found, Writer):
        for length in (0, 20, 60):
            text = found.walk(chooser, length)
            if text is not None:
                assert is_valid(schema, json.loads(text)), text


def test_white_space_is_between_tokens_and_not_in_them() -> None:
    for schema, text in (
        ({"type": "integer", "multipleOf": 2}, "8.0"),
        ({"type": "array", "items": {"multipleOf": 3}}, "[6.0]"),
    ):
        found = writer(schema, compact=False)
        assert found.writes(text)
        assert not found.writes(text.replace(".", " ."))
        assert found.writes(" " + text.replace("[", "[ ").replace("]", "\n]"))
        assert not writer(schema).writes(" " + text)


@pytest.mark.parametrize(
    ("schema", "written", "not_written"),
    [
        ({"enum": [BIG]}, [f"{BIG}"], [f"{BIG - 1}", f"{BIG + 1}"]),
        ({"const": {"id": BIG}}, [f'{{"id":{BIG}}}'], [f'{{"id":{BIG - 1}}}']),
        ({"type": "integer", "enum": [10**20]}, [f"{10**20}"], [f"{2**63 - 1}", "1e20"]),
        ({"type": "integer", "enum": [1e20]}, [f"{10**20}"], [f"{2**63 - 1}"]),
        ({"type": "integer", "minimum": BIG}, [f"{BIG}", f"{10**30}"], [f"{BIG - 1}", "1", f"-{BIG}"]),
        ({"type": "integer", "maximum": -BIG}, [f"-{BIG}"], [f"-{BIG - 1}", f"{BIG}"]),
        ({"type": "integer", "exclusiveMinimum": BIG, "maximum": BIG + 2}, [f"{BIG + 1}"], [f"{BIG}", f"{BIG + 3}"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [f"-{2**63}", "0"], [f"{2**63}"]),
        ({"type": "number", "minimum": 0.1, "exclusiveMaximum": 1e22}, ["0.1", "9" * 22], ["0.09", "1" + "0" * 22]),
        ({"not": {"const": BIG}, "type": "integer"}, [f"{BIG - 1}"], [f"{BIG}"]),
        ({"not": {"enum": [1]}, "type": "number"}, ["1.5", "10"], ["1", "1.0", "1.00"]),
        ({"not": {"type": "integer"}, "type": "number"}, ["1.5"], ["1", "1.0", "10"]),
        ({"type": "number", "multipleOf": 0.01}, ["19.99", "-3"], ["0.001"]),
    ],
)
def test_numbers_are_those_of_the_schema(schema: Any, written: list[str], not_written: list[str]) -> None:
    found = writer(schema)
    assert [text for text in written if not found.writes(text)] == []
    assert [text for text in not_written if found.writes(text)] == []


def test_numbers_in_tools_and_tags_are_those_of_the_schema() -> None:
    schema = {"properties": {"id": {"enum": [BIG]}}, "required": ["id"], "additionalProperties": False}
    call = '<tool_call>\n{{"name": "f", "arguments": {{"id":{id}}}}}\n</tool_call>'
    tools = Writer(ToolCalls, BYTES, format="hermes", tools=[{"name": "f", "parameters": schema}], choice="required")
    tag = {"begin": "<a>", "end": "</a>", "content": {"type": "json_schema", "json_schema": schema}}
    tags = Writer(StructuralTag, BYTES, format={"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]})
    lark = Writer(Grammar, BYTES, lark=f"start: %json {json.dumps(schema)}")
    for value in (BIG, BIG - 1):
        assert tools.writes(call.format(id=value)) == (value == BIG)
        assert tags.writes(f'<a>{{"id":{value}}}</a>') == (value == BIG)
        assert lark.writes(f'{{"id": {value}}}') == (value == BIG)


MANY = [f"p{index}" for index in range(20)]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_many_members_are_counted_and_ordered(data: st.DataObject) -> None:
    named = MANY[: data.draw(st.integers(0, 20))]
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "null"} for name in named}}
    schema["required"] = data.draw(st.lists(st.sampled_from(MANY), max_size=4, unique=True))
    for keyword in data.draw(st.sets(st.sampled_from(["minProperties", "maxProperties"]))):
        schema[keyword] = data.draw(st.integers(0, 12))
    schema["additionalProperties"] = data.draw(st.booleans())
    found = enforced(schema)
    for size in (0, 1, 3, 8, 12, 20):
        chosen = data.draw(st.sets(st.sampled_from([*MANY, "x"]), min_size=min(size, 10), max_size=size))
        chosen |= set(data.draw(st.sampled_from([[], schema["required"]])))
        order = [*named, *schema["required"], *MANY, "x"]  # of the grammar
        value = dict.fromkeys(sorted(chosen, key=order.index))
        if isinstance(found, Writer):
            assert found.writes(json.dumps(value, separators=(",", ":"))) == is_valid(schema, value), value
        else:
            assert "minProperties" in found.problem or not is_valid(schema, value), found


ENDS = st.one_of(st.sampled_from(NUMBERS), st.integers(-1200, 1200), st.integers(-900, 900).map(lambda n: n / 64))
INSIDE = {
    "minimum": lambda value, end: value >= end,
    "maximum": lambda value, end: value <= end,
    "exclusiveMinimum": lambda value, end: value > end,
    "exclusiveMaximum": lambda value, end: value < end,
}


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(INSIDE)), ENDS), st.booleans(), st.lists(ENDS, max_size=5))
def test_bounds_are_exact(bounds: dict[str, Any], integers: bool, numbers: list[Any]) -> None:
    found = enforced({"type": "integer" if integers else "number", **bounds})
    near = (-1, Fraction(-1, 64), 0, Fraction(1, 64), 1)
    for value in [*map(Fraction, numbers), *(Fraction(end) + delta for end in bounds.values() for delta in near)]:
        inside = all(INSIDE[keyword](value, Fraction(end)) for keyword, end in bounds.items())
        wanted = inside and not (integers and value.denominator > 1)
        assert (isinstance(found, Writer) and found.writes(decimal_of(value))) == wanted, value


def decimal_of(value: Fraction) -> str:
    """Digits of a value whose denominator is a power of two."""
    if value.denominator == 1:
        return str(value.numerator)
    shift = len(str(value.denominator)) * 4
    digits = f"{abs(value) * 10**shift}".rjust(shift + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-shift]}.{digits[-shift:]}".rstrip("0")


@pytest.mark.parametrize("option", ["lenient", "coerce_one_of"])
@pytest.mark.parametrize("value", [True, 1, None])
def test_enforcement_cannot_be_switched_off(option: str, value: Any) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"minimum": 2}], "x-guidance": {option: value}}
    tag = {"begin": "<a>", "end": "", "content": {"type": "json_schema", "json_schema": schema}}
    for kind, args, argument in (
        (JsonSchema, {"schema": schema}, "schema"),
        (Grammar, {"lark": f"start: %json {json.dumps(schema)}"}, "lark"),
        (Grammar, {"lark": f"start: a\na: %json{json.dumps(schema)}"}, "lark"),
        (StructuralTag, {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}}, "format"),
        (ToolCalls, {"format": "hermes", "tools": [{"name": "f", "parameters": schema}]}, "tools[0].parameters"),
    ):
        with pytest.raises(ArgumentError, match=f"#/x-guidance/{option}") as caught:
            Writer(kind, BYTES, **args)
        assert caught.value.argument == argument


def test_options_of_white_space_are_those_of_the_argument() -> None:
    with pytest.raises(ArgumentError, match="contradicts the argument compact"):
        writer({"x-guidance": {"whitespace_flexible": True}})
    with pytest.raises(ArgumentError, match="#/x-guidance/item_separator"):
        writer({"x-guidance": {"item_separator": ";"}})
    with pytest.raises(ArgumentError, match="#/items/x-guidance"):
        writer({"items": {"x-guidance": {"lenient": True}, "type": "null"}})
    flexible = Writer(Grammar, BYTES, lark='start: %json {"type": "array"}')
    compact = Writer(
        Grammar, BYTES, lark='start: %json {"type": "array", "x-guidance": {"whitespace_flexible": false}}'
    )
    assert [each.writes("[ 1 ]") for each in (flexible, compact)] == [True, False]


def test_a_schema_in_a_grammar_is_read_in_one_way() -> None:
    with pytest.raises(ArgumentError, match='the key "minimum" occurs twice'):
        Writer(Grammar, BYTES, lark='start: %json {"minimum": 1, "minimum": 2}')


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_nodes_of_many_kinds_are_written_once(keyword: str) -> None:
    """Each member that is any node had rules of its own for nodes of all kinds."""
    kinds = [f"k{number}" for number in range(60)]
    node = {"$ref": "#/$defs/node", "description": "a part"}
    nodes = [
        {"type": "object", "properties": {"kind": {"const": kind}, "left": node, "right": node}, "required": ["kind"]}
        for kind in kinds
    ]
    schema = {"$ref": "#/$defs/node", "$defs": {"node": {keyword: nodes}}}
    assert lark_grammar(schema).count("\n") < 10 * len(kinds)
    found = writer(schema)
    assert found.writes('{"kind":"k1","left":{"kind":"k2","right":{"kind":"k59"}}}')
    assert not found.writes('{"kind":"k1","left":{"kind":"k60"}}')


def test_references_that_go_round_are_refused() -> None:
    round_about = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(ArgumentError, match="refers to itself without an end"):
        writer(round_about)


@pytest.mark.parametrize("impossible", [{"pattern": "^(?!a)a$"}, {"not": {"pattern": "^"}}, {"pattern": "^(?=b)a"}])
def test_no_text_begins_that_cannot_end(impossible: dict[str, Any]) -> None:
    """The name of such a member could be written, and no token was left behind it."""
    member = {"type": "string", **impossible}
    found = writer({"type": "object", "properties": {"a": member, "b": {}}, "additionalProperties": False})
    assert not found.goes_on(b'{"a')
    assert found.writes('{"b":1}')
    assert not writer({"type": "array", "items": member}).goes_on(b'["')
    with pytest.raises(ArgumentError, match="no JSON matches it"):
        writer({"type": "array", "items": member, "minItems": 1})


def test_a_look_around_that_is_hard_to_decide_is_enforced() -> None:
    """To tell that it has a text takes more work than a document has."""
    rules = [rf"(?=(?:.*{kind}){{3}})" for kind in (r"\d", "[A-Z]", "[a-z]", r"[^\w]")]
    member = {"type": "string", "pattern": f"^(?=.{{20,40}}$){''.join(rules)}.*$"}
    found = writer({"properties": {"a": member, "b": member}, "required": ["a", "b"], "additionalProperties": False})
    text = "abcABC123---abcABC123"
    assert found.writes_value({"a": text, "b": text[::-1]})
    assert not found.writes_value({"a": text.lower(), "b": text})


def test_a_named_member_has_no_other_spelling() -> None:
    found = writer({"properties": {"a": {"type": "integer"}}})
    assert found.writes('{"a":1}')
    assert not found.writes('{"\\u0061":"x"}')
    assert not found.writes('{"a":1,"\\u0061":"x"}')


@settings(max_examples=examples(300))
@given(st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32), st.sampled_from(["date", "date-time"]))
def test_dates_are_of_the_calendar(year: int, month: int, day: int, name: str) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        date(year, month, day)
        exists = True
    except ValueError:
        exists = False
    language = format_language(name)
    assert language is not None
    assert matches(language, text + ("T00:00:00Z" if name == "date-time" else "")) == exists


@pytest.mark.parametrize("year", [1900, 2000, 2023, 2024, 9750])
def test_a_leap_day_is_in_leap_years(year: int) -> None:
    found = writer({"type": "string", "format": "date"})
    assert found.writes(f'"{year}-02-29"') == (year in (2000, 2024))


def test_a_leap_second_is_the_last_of_a_day_in_utc() -> None:
    language = format_language("time")
    assert language is not None
    for text, right in [
        ("23:59:60Z", True),
        ("15:59:60.5-08:00", True),
        ("05:29:60+05:30", True),
        ("22:59:60Z", False),
        ("23:59:60+01:00", False),
        ("12:00:60Z", False),
    ]:
        assert matches(language, text) == right, text


PATTERNS = [
    *("^(?!aws:)[a-z:]+$", "^(?!.*--)[a-c-]*$", "^(?=.*a)(?=.*b).{2,4}$", "^[a-c]+(?<!c)$", "^ab(?!c)"),
    *("^(?!ab$)", "(?<!b)$", "^(a|b)(?=c)", "^(?:(?!a)[a-c]|ab)c?$", "^.{2}(?!a)b*", "(^a|b$)", "^a|b", "a(b|$)"),
    *("(a|^)b", "^(?!(a|b)$).*$", "[^a]b?$", "(?:^|,)a", "a{2}|b{1,2}$", "a??b", "(a*)*b", "^$|^a", "()a", "(|a)b"),
    *("^(?!^[-:]*$)[-:]?a?$", "^(?=^a$|^b)", "[ab](?<!^a$)$", "(?<=^a$|b)$"),
    *("^[\\w-]+$", "\\D$", "[^\\s,]", "\\u0061|\\x62c", "^(?<name>a)b?", "^[a-b]{2,}?c*$", "\\.|a\\-"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_found_where_an_engine_finds_them(pattern: str) -> None:
    language = searched(pattern)
    texts = ["".join(chars) for length in range(5) for chars in product("abc-:,", repeat=length)]
    for text in texts:
        assert matches(language, text) == bool(re.search(pattern.replace("(?<name>", "(?P<name>"), text)), text
    assert not is_empty(language)


ATOMS = (
    "a",
    "b",
    "c",
    ".",
    "[ab]",
    "[^a]",
    "\\d",
    "\\.",
    "(?:ab|c)",
    "(a|b)",
    "-",
    "^",
    "$",
    "(?=a)",
    "(?!b$)",
    "(|a)",
    "(?:^|b)",
    "(?!^a|b)",
    "(?=$a|$)",
    "(?<!a^|b$)",
)
TIMES = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "{0}", "{2,}", "*?")
TEXTS = ["".join(chars) for length in range(4) for chars in product("abc1-", repeat=length)]
terms = st.tuples(st.sampled_from(ATOMS), st.sampled_from(TIMES)).map("".join)
sequences = st.lists(terms, max_size=3).map("".join)
alternatives = st.lists(sequences, min_size=1, max_size=2).map("|".join)


@settings(max_examples=examples(2000), deadline=None)
@given(st.lists(st.one_of(terms, alternatives.map("({})".format)), max_size=3).map("".join), st.data())
def test_a_pattern_is_refused_or_found_where_re_finds_it(pattern: str, data: st.DataObject) -> None:
    try:
        language = searched(pattern)
    except PatternError:
        return
    for text in data.draw(st.lists(st.sampled_from(TEXTS), min_size=10, max_size=10)):
        assert matches(language, text) == bool(re.search(pattern, text)), text


CAT = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"properties": {"kind": {"enum": ["dog", "wolf"]}, "good": {"type": "boolean"}}, "required": ["kind"]}
CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"$defs": {"cat": CAT, "dog": DOG}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
            [{"kind": "cat", "lives": 9}, {"kind": "wolf", "good": True}],
            [{"kind": "cat", "lives": True}, {"kind": "dog", "good": 1}, {"kind": "cow"}, {}],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1.5], [1, "a"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}, [1, "a", None], [1.5, True]),
        (
            {
                "oneOf": [
                    {"required": ["a"], **CLOSED, "properties": {"a": True}},
                    {"required": ["b"], **CLOSED, "properties": {"b": True}},
                ],
                "type": "object",
            },
            [{"a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}, {}, {"c": 1}],
        ),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        (
            {"dependentRequired": {"card": ["address"]}, "dependencies": {"a": ["b"]}},
            [{}, {"address": 1}, {"card": 1, "address": 2}, {"a": 1, "b": 2}],
            [{"card": 1}, {"a": 1}],
        ),
        ({"not": {"type": ["string", "null"]}}, [1, True, [], {}], ["a", None]),
        ({"type": "string", "not": {"enum": ["a", "b"]}}, ["", "c", "aa"], ["a", "b", 1]),
        (
            {
                "type": "object",
                "properties": {"country": {"enum": ["US", "CA"]}},
                "if": {"properties": {"country": {"const": "US"}}, "required": ["country"]},
                "then": {"properties": {"code": {"pattern": "^[0-9]{2}$"}}, "required": ["code"]},
                "else": {"properties": {"code": {"pattern": "^[A-Z]$"}}},
            },
            [{"country": "US", "code": "12"}, {"country": "CA", "code": "K"}, {"country": "CA"}, {}],
            [{"country": "US", "code": "K"}, {"country": "US"}, {"country": "CA", "code": "12"}],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/base"}],
                "properties": {"b": True},
                "unevaluatedProperties": False,
                "$defs": {"base": {"properties": {"a": {"type": "integer"}}}},
            },
            [{"a": 1, "b": None}],
            [{"a": 1, "c": 1}, {"a": "x"}],
        ),
        (
            {
                "$id": "urn:a",
                "properties": {"own": {"$ref": "#/$defs/n"}, "other": {"$ref": "urn:b"}},
                "$defs": {
                    "n": {"type": "boolean"},
                    "b": {"$id": "urn:b", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}},
                },
            },
            [{"own": True, "other": [1]}],
            [{"own": 1}, {"other": [True]}],
        ),
        (
            {"uniqueItems": True, "items": {"enum": ["a", 1, None]}, "minItems": 2},
            [["a", 1], [None, 1, "a"]],
            [["a"], ["a", "a"], [1, 1, "a"]],
        ),
        ({"contains": {"const": 1}, "maxItems": 3}, [[1], [2, 1, 3]], [[], [2], [1, 2, 3, 4]]),
        ({"propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 1}, [{"ab": 1}], [{}, {"A": 1}]),
        (
            {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
            [{"x-a": "s", "b": 1}],
            [{"x-a": 1}, {"b": "s"}],
        ),
    ],
)
def test_conditions_are_enforced(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    found = writer(schema)
    assert all(is_valid(schema, value) for value in valid)
    assert not any(is_valid(schema, value) for value in invalid)
    assert [value for value in valid if not found.writes_value(value)] == []
    assert [value for value in invalid if found.writes_value(value)] == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a/b": {"pattern": "(a"}}}, "#/properties/a~1b/pattern: unclosed group"),
        ({"pattern": "^(?!a){2}"}, "#/pattern: nothing to repeat at 6"),
        ({"pattern": "^(?!$a)a$"}, "#/pattern: has a look-around with ^, $"),
        ({"pattern": "a(?<=a^)$"}, "#/pattern: has a look-around with ^, $"),
        ({"pattern": "^{1,}"}, "#/pattern: nothing to repeat at 1"),
        ({"pattern": "a{1}{2}"}, "#/pattern: nothing to repeat at 4"),
        ({"pattern": "\\ud83d\\u0041"}, "#/pattern: no character"),
        ({"pattern": "\\x\u0663\u0663"}, "#/pattern: expected 2 hexadecimal digits"),
        ({"prefixItems": [{}], "items": [{}]}, "#/items: expected a schema beside prefixItems"),
        ({"items": {"format": "color"}}, '#/items/format: unknown format "color"'),
        ({"$ref": "other.json#/x"}, "#/$ref: there is no"),
        ({"items": {"minimum": "1"}}, "#/items/minimum: expected a number"),
        ({"type": "any"}, "#/type: expected the names of types"),
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems can only"),
        ({"properties": {"a": 1}}, "#/properties/a: expected a schema"),
        ({"required": True}, "#/required: expected a list"),
        ({"enum": ["\ud800"]}, "#/enum: half of a surrogate pair"),
        (
            {
                "$defs": {"a": {"required": ["b"], "properties": {"b": {"$ref": "#/$defs/a"}}, "type": "object"}},
                "items": {"$ref": "#/$defs/a"},
                "minItems": 1,
                "type": "array",
            },
            "#/$defs/a: no JSON matches",
        ),
    ],
)
def test_a_refusal_names_the_place(schema: Any, place: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        writer(schema)
    assert caught.value.problem.startswith(place), caught.value.problem


@pytest.mark.parametrize("keyword", ["maxLength", "minLength", "maxItems", "minItems", "maxProperties"])
@pytest.mark.parametrize("number", [2**31 - 1, 2**31, 2**32, 10**20])
def test_sizes_that_no_answer_has(keyword: str, number: int) -> None:
    """The compiler counts to 2**31 - 1."""
    assert writer({keyword: number, "type": {"L": "string", "I": "array", "P": "object"}[keyword[3]]})


def test_drafts_with_other_keywords_are_refused() -> None:
    schema = {"$schema": "http://json-schema.org/draft-03/schema#", "type": "integer", "divisibleBy": 7}
    with pytest.raises(ArgumentError, match=r"#/\$schema: expected draft 4 or a later one"):
        writer(schema)


def test_draft_4_has_its_own_bounds_and_no_fractional_integers() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 1,
        "exclusiveMinimum": True,
    }
    found = writer(schema, compact=False)
    assert [found.writes(text) for text in ("1", "2", "2.0")] == [False, True, False]


@pytest.mark.parametrize("keyword", ["multipleOf", "minimum", "exclusiveMaximum", "const", "maxLength", "minItems"])
@pytest.mark.parametrize("extra", [{}, {"type": "integer"}, {"multipleOf": 3}, {"maximum": 7 * 10**350}])
@pytest.mark.parametrize("number", [10**308, 10**309, 7 * 10**350, -7 * 10**350, 7 * 10**399, 10**401, 2**32, 5e-324])
def test_huge_and_tiny_numbers_are_honoured_or_refused(
    keyword: str, extra: dict[str, Any], number: int | float
) -> None:
    for schema in ({**extra, keyword: number}, {"allOf": [{keyword: number}, extra]}, {"not": {keyword: number}}):
        with contextlib.suppress(SchemaRefused):
            lark_grammar(schema)


def test_a_step_that_is_no_float64_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="multipleOf cannot be enforced"):
        lark_grammar({"multipleOf": 7 * 10**350})
