"""Tool calls in every format: what may be written, and what never is."""

from __future__ import annotations

import random
import re
from typing import Any, get_args

import jsonschema
import pytest
from effort import examples
from followed_texts import (
    CONTEXT,
    END,
    VOCABULARY,
    WIDTH,
    ByteTokenizer,
    ByteVocabulary,
    allowed,
    follow,
    follow_bytes,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from written_calls import ONLY_FIRST, SPELLINGS, Call, format_of, read_one, said, said_before_calls, written

from adapters.calls import FORMATS, written_calls
from adapters.calls.xml_values import value_of
from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context
from adapters.grammars.json_schema import argument_kinds
from adapters.processors.tool_calls import ToolCalls

ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TWO = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}
A, B = Call("one", {"a": 1}), Call("one_more", {"b": True})


def calls(format_: str, **options: Any) -> ToolCalls:
    tools = [{"name": "one", "parameters": ONE}, {"name": "one_more", "parameters": TWO}]
    return ToolCalls(ToolCalls.Args.model_validate({"format": format_, "tools": tools, **options}), CONTEXT)


def of(format_: str, properties: dict[str, Any], **keywords: Any) -> ToolCalls:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **keywords}
    return calls(format_, tools=[{"name": "f", "parameters": schema}], choice="required", parallel=False)


def test_every_format_is_tested_and_may_be_named() -> None:
    assert {format_of(spelling) for spelling in SPELLINGS} == set(FORMATS)
    assert set(get_args(ToolCalls.Args.model_fields["format"].annotation)) == set(FORMATS)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_call_in_each_format(spelling: str) -> None:
    name, call = format_of(spelling), written(spelling, A)
    auto, required = calls(name), calls(name, choice="required")
    for processor in (auto, required, calls(name, choice="required", tool="one", parallel=False)):
        assert follow(processor, call) == "complete"
        assert follow(processor, call[:-1]) == "open" or spelling == "harmony"
        assert "stopped" in follow(processor, written(spelling, Call("two", {"a": 1})))
        assert "stopped" in follow(processor, written(spelling, Call("one", {"b": 1})))
        assert "stopped" in follow(processor, written(spelling, Call("one", {"a": "x"})))
    assert follow(auto, said(spelling, "No call is needed.")) == "complete"
    assert "stopped" in follow(required, said(spelling, "Let me see."))
    assert follow(required, "") == "open"
    assert follow(required, written(spelling, B)) == "complete"
    assert "stopped" in follow(calls(name, choice="required", tool="one"), written(spelling, B))


@pytest.mark.parametrize("spelling", ["cohere2", "kimi_k2"])
def test_a_call_has_a_number_of_up_to_three_digits(spelling: str) -> None:
    before, behind = ('"tool_call_id": "', '"') if spelling == "cohere2" else ("functions.one:", "<|")
    text = written(spelling, A)
    assert f"{before}0{behind}" in text
    for number, is_one in (("7", True), ("042", True), ("999", True), ("", False), ("1000", False), ("x", False)):
        changed = text.replace(f"{before}0{behind}", f"{before}{number}{behind}")
        assert (follow(calls(spelling, choice="required"), changed) == "complete") is is_one


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_text_before_a_call(spelling: str) -> None:
    """It may be anything; but where a call may only begin an answer, one behind it is text."""
    name = format_of(spelling)
    for text in ("Let me see. ", "\n\n", "中文 <tool and [ {"):
        assert follow(calls(name), said_before_calls(spelling, text, A)) == "complete"
    wrong = follow(calls(name), said_before_calls(spelling, "Let me see. ", Call("two", {"a": 1})))
    assert (wrong == "complete") is (spelling in ONLY_FIRST)


@pytest.mark.parametrize("spelling", ONLY_FIRST)
def test_white_space_may_be_before_a_first_call(spelling: str) -> None:
    assert follow(calls(format_of(spelling)), "\n\n" + written(spelling, A)) == "complete"
    assert "stopped" in follow(calls(format_of(spelling)), "\n\n" + written(spelling, Call("two", {"a": 1})))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_parallel_calls(spelling: str) -> None:
    name, two = format_of(spelling), written(spelling, A, B, A)
    for choice in ("auto", "required"):
        assert follow(calls(name, choice=choice), two) == "complete"
        assert "stopped" in follow(calls(name, choice=choice, parallel=False), two)
    assert "stopped" in follow(calls(name, choice="required"), written(spelling, A, Call("two", {})))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_call_where_none_may_come(spelling: str) -> None:
    none = calls(format_of(spelling), choice="none")
    assert follow(none, said(spelling, "No call, <f=one> and {} too.")) == "complete"
    assert "stopped" in follow(none, written(spelling, A))
    behind = follow(none, said_before_calls(spelling, "Let me see. ", A))
    assert (behind == "complete") is (spelling in ONLY_FIRST)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_text_does_not_spell_the_token_of_a_call(choice: str) -> None:
    """Who reads the answer cannot tell them apart: a call of any arguments was read."""
    for before in (b"", b"Let me see. "):
        text = before + b'<|python_tag|>{"name": "one", "parameters": {"a":"x"}}'
        stop = len(before) + len(b"<|python_tag|")
        assert follow_bytes(calls("llama3_json", choice=choice), text) == f"stopped at {stop}"
        assert follow_bytes(calls("llama3_json", choice=choice), text[:stop]) == "complete"


class HarmonyTokenizer(ByteTokenizer):
    """A tokenizer that has the marks of channels as special tokens, too."""

    all_special_ids = tuple(range(END, END + 2 + len(FORMATS["harmony"].special)))

    def __len__(self) -> int:
        return END + 2 + len(FORMATS["harmony"].special)


class HarmonyVocabulary(ByteVocabulary):
    """Marks of channels that are special tokens."""

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for part in re.split(r"(<\|[a-z]+\|>)", text):
            mark = FORMATS["harmony"].special.index(part) if part in FORMATS["harmony"].special else None
            found += list(part.encode()) if mark is None else [END + 2 + mark]
        return found


def test_messages_do_not_spell_the_tokens_of_channels() -> None:
    vocabulary = HarmonyVocabulary(WIDTH, HarmonyTokenizer(), [END])
    context = Context(vocabulary, end_token_ids=frozenset({END}))
    args = ToolCalls.Args.model_validate({"format": "harmony", "tools": [{"name": "one", "parameters": ONE}]})
    for head in ("analysis", "final"):
        for mark in FORMATS["harmony"].special:
            chain = ProcessorChain([ToolCalls(args, context)], context)
            chain.start([1])
            written_so_far = [*vocabulary.encode(f"<|channel|>{head}<|message|>a "), *mark.encode()[:-1]]
            for token_id in written_so_far:
                assert token_id in allowed(chain)
                chain.accept(token_id, chain.position)
            assert ord(">") not in allowed(chain)
            assert ord("x") in allowed(chain)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_answer_of_its_own_beside_calls(spelling: str) -> None:
    """As tools beside a ``response_format``: calls alone, or what was asked for."""
    name, call = format_of(spelling), written(spelling, A)
    either = calls(name, answer={"type": "json_schema", "json_schema": {"const": {"name": "x"}}})
    assert follow(either, call) == "complete"
    assert follow(either, said(spelling, '{"name":"x"}')) == "complete"
    for text in ("", "text", '{"name":"y"}', "{" + call, f"{call} text", '{"name":"x"}' + call):
        assert follow(either, text) != "complete"
        assert follow(either, said(spelling, text)) != "complete" or said(spelling, text) == call
    pattern = calls(name, answer={"type": "regex", "pattern": "[0-9]+"}, parallel=False)
    assert follow(pattern, said(spelling, "42")) == follow(pattern, call) == "complete"
    with pytest.raises(ValidationError, match="answer needs the choice auto"):
        calls(name, choice="required", answer={"type": "regex", "pattern": "a"})


def test_an_answer_of_its_own_is_all_that_the_user_is_told() -> None:
    """A message in the commentary before it would be text, too, and both together are no JSON."""
    message, final = "<|channel|>%s<|message|>Hm.<|end|><|start|>assistant", said("harmony", "{}")
    either = calls("harmony", answer={"type": "json_schema", "json_schema": {"type": "object"}})
    assert follow(either, message % "analysis" + final) == "complete"
    assert follow(either, message % "analysis" + message % "commentary" + final).startswith("stopped")
    assert follow(calls("harmony"), message % "commentary" + final) == "complete"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_call_ends_with_nothing_but_further_calls(spelling: str) -> None:
    """Where the format says so; elsewhere text may follow."""
    behind = follow(calls(format_of(spelling)), written(spelling, A) + " and so on")
    assert (behind == "complete") is not FORMATS[format_of(spelling)].ends


def test_thinking_comes_before_a_call_in_channels() -> None:
    before = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
    for choice in ("auto", "required"):
        assert follow(calls("harmony", choice=choice), before * 2 + written("harmony", A)) == "complete"
        assert follow(calls("harmony", choice=choice), before) == "open"
    assert follow(calls("harmony", choice="none"), before + said("harmony", "Hello")) == "complete"
    assert "stopped" in follow(calls("harmony"), said("harmony", "Hello<|end|>"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_writer_writes_what_is_allowed(name: str) -> None:
    """What history says of earlier calls is what the model may write."""
    assert follow(calls(name), written_calls(FORMATS[name], [A, B])) == "complete"


@pytest.mark.parametrize(
    "parameters",
    [
        True,
        {},
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": ["object", "null"]},
        {"anyOf": [{"const": 3}, {"type": "object"}]},
        {"$ref": "#/$defs/any", "$defs": {"any": {}}},
    ],
)
def test_arguments_are_an_object(parameters: Any) -> None:
    processor = calls("hermes", tools=[{"name": "one", "parameters": parameters}])
    call = written("hermes", A)
    assert follow(processor, call) == "complete"
    for other in ("3", "null", "[]", '"a"'):
        assert "stopped" in follow(processor, call.replace('{"a":1}', other))


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["array", "null"]}, {"const": 3}, False])
@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder"])
def test_arguments_that_can_be_no_object_are_refused(name: str, parameters: Any) -> None:
    with pytest.raises(ArgumentError, match="tools"):
        calls(name, tools=[{"name": "one", "parameters": parameters}])


@pytest.mark.parametrize("required", [[["a"]], [{}], [1], [None]])
def test_required_arguments_are_names(required: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {}}, "required": required}
    with pytest.raises(ArgumentError, match=r"tools\[0\].parameters: .*#/required: expected names"):
        calls("hermes", tools=[{"name": "one", "parameters": parameters}])


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match="tool: expected the name of one of the tools"):
        calls("hermes", tool="three")
    with pytest.raises(ValidationError):
        ToolCalls.Args.model_validate({"format": "hermes", "tools": [{"name": 'a"b'}]})
    with pytest.raises(ArgumentError, match="each name once"):
        calls("hermes", tools=[{"name": "one"}, {"name": "one"}])
    with pytest.raises(ArgumentError, match="the name all means text"):
        calls("functionary_v3_2", tools=[{"name": "all"}])


PYTHON = [
    ({"a": {"type": "boolean"}}, [], "[f(a=True)]", "complete"),
    ({"a": {"type": "boolean"}}, [], "[f(a=true", "stopped at 5"),
    ({"a": {"type": ["null", "number"]}}, [], "[f(a=None)]", "complete"),
    ({"a": {}}, [], '[f(a={"x":[None,False,"é\\"",1.5e3]})]', "complete"),
    ({"a": {"enum": [None, True, "null"]}}, [], '[f(a="null")]', "complete"),
    ({"a": {}, "b": {}}, [], "[f()]", "complete"),
    ({"a": {}, "b": {}}, ["b"], "[f(b=1)]", "complete"),
    ({"a": {}, "b": {}}, ["b"], "[f(a=1)", "stopped at 6"),
    ({"a": {}, "b": {}}, [], "[f(a=1, b=2)]", "complete"),
    ({"a": {}, "b": {}}, [], "[f(a=1,b=2)]", "stopped at 7"),
    ({"from": {}}, [], "[f(from=1)]", "complete"),
]


@pytest.mark.parametrize(("properties", "required", "text", "outcome"), PYTHON)
def test_keyword_arguments(properties: dict[str, Any], required: list[str], text: str, outcome: str) -> None:
    assert follow(of("pythonic", properties, required=required), text) == outcome


def tagged(**values: str) -> str:
    arguments = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"


OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TAGGED = [
    ({"type": "string"}, 'Some text\nof two lines </param and "quotes"', True),
    ({"type": "string"}, "", True),
    ({"type": "string"}, "a\n</parameter", True),
    ({"type": "string", "maxLength": 2}, "abc", False),
    ({"type": "string", "minLength": 2}, "é中", True),
    ({"type": "string", "pattern": "^[a-z]+$"}, "abc", True),
    ({"type": "string", "pattern": "^[a-z]+$"}, "aBc", False),
    ({"type": "string", "format": "date"}, "2024-02-29", True),
    ({"type": "string", "format": "date"}, "2024-02-30", False),
    ({"enum": ["one", "two\nthree", 4]}, "two\nthree", True),
    ({"enum": ["one", 4]}, "4", True),
    ({"enum": ["one", 4]}, '"one"', False),
    ({"type": "integer"}, "-12", True),
    ({"type": "integer"}, "1.5", False),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", False),
    ({"type": "array", "items": {"type": "string"}}, '["a","b\\n"]', True),
    ({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, '{"x":1}', True),
    (OPTIONAL_TEXT, "null", True),
    (OPTIONAL_TEXT, "nulls", True),
    ({"type": ["string", "integer"], "maximum": 5}, "3", True),
    ({"type": ["string", "integer"], "maximum": 5}, "7", False),
    ({"type": ["string", "integer"]}, "7 of them", True),
    ({"type": ["string", "array"], "items": {"type": "integer"}}, "[1,2]", True),
    ({"type": ["string", "array"], "items": {"type": "integer"}}, "[a]", False),
    ({}, "anything", True),
    ({}, '{"a":[1,null]}', True),
]


@pytest.mark.parametrize(("schema", "text", "is_value"), TAGGED)
def test_arguments_between_tags(schema: Any, text: str, is_value: bool) -> None:
    assert (follow(of("qwen3_coder", {"a": schema}), tagged(a=text)) == "complete") is is_value


def test_arguments_between_tags_are_in_order_and_required() -> None:
    processor = of("qwen3_coder", {"a": {"type": "integer"}, "b": {"type": "string"}}, required=["b"])
    assert follow(processor, tagged(a="1", b="x")) == follow(processor, tagged(b="x")) == "complete"
    for wrong in (tagged(), tagged(a="1"), tagged(b="x", a="1"), tagged(b="x", c="1"), tagged(b="x", **{"b ": "x"})):
        assert "stopped" in follow(processor, wrong)
    assert follow(of("qwen3_coder", {}), tagged()) == "complete"


@pytest.mark.parametrize(
    ("name", "schema", "problem"),
    [
        ("pythonic", {"properties": {"a b": {}}}, "'a b' cannot be written as the name of a keyword argument"),
        ("qwen3_coder", {"properties": {"a>b": {}}}, "'a>b' cannot be written in a tag"),
        ("pythonic", {"minProperties": 1}, "needs an argument that it does not name"),
        ("qwen3_coder", {"properties": {"a": {}}, "minProperties": 2}, "needs an argument that it does not name"),
        ("qwen3_coder", {"properties": {"a": {"type": ["string", "integer"], "multipleOf": 7}}}, "multipleOf cannot"),
        ("qwen3_coder", {"properties": {"a": {"pattern": "(?=a)"}}}, "pattern"),
        ("pythonic", {"properties": {"a": {"format": "color", "type": "string"}}}, "unknown format"),
    ],
)
def test_a_schema_that_a_notation_cannot_hold_is_named(name: str, schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match="the parameters of f") as refused:
        calls(name, tools=[{"name": "f", "parameters": schema}])
    assert problem in refused.value.problem


def test_a_schema_of_the_answer_is_named_by_its_argument() -> None:
    with pytest.raises(ArgumentError, match=r"^answer\.json_schema: #/type: expected the names of types"):
        calls("hermes", answer={"type": "json_schema", "json_schema": {"type": "objekt"}})


MIXED = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 3},
        "count": {"type": ["integer", "null"], "minimum": -20, "maximum": 20},
        "either": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}, {"enum": [7, 12.5]}]},
        "list": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2},
        "one_of": {"enum": ["a\nb", "null", "7", 7, True, {"x": [None]}]},
    },
    "required": ["text"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_written_is_a_call(spelling: str, seed: int) -> None:
    """A random walk through the masks ends in one call, whose arguments match the schema."""
    choose = random.Random(seed)
    tools = [{"name": "f", "parameters": MIXED}, {"name": "f.g-h_2", "parameters": MIXED}]
    processor = calls(format_of(spelling), tools=tools, choice="required", parallel=False)
    chain = ProcessorChain([processor], CONTEXT)
    chain.start([1])
    for token_id in VOCABULARY.encode(written(spelling, Call("\0", {})).partition("\0")[0]):
        chain.accept(token_id, chain.position)
    while chain.tokens[-1] != END:
        assert len(chain.tokens) < 3000
        options = allowed(chain)
        chain.accept(END if END in options else choose.choice(sorted(options)), chain.position)
    text = text_of(chain.tokens[1:-1]).removeprefix(">>>")
    call = read_one(spelling, text, MIXED)
    assert call.name in ("f", "f.g-h_2")
    jsonschema.validate(call.arguments, MIXED)


@settings(max_examples=examples(200), deadline=None)
@given(
    value=st.one_of(
        st.none(), st.booleans(), st.integers(-999, 999), st.text(max_size=6), st.lists(st.text(max_size=3), max_size=2)
    )
)
def test_a_value_between_tags_is_read_as_it_was_meant(value: Any) -> None:
    """Unless it is a text that means something else, which cannot be written."""
    schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    text = written("qwen3_coder", Call("f", {"a": value})).partition("<parameter=a>\n")[2].partition("\n</param")[0]
    followed = follow(of("qwen3_coder", {"a": {}}), tagged(a=text))
    if isinstance(value, str) and "\n</parameter>" in value:
        return
    kinds = argument_kinds(schema)["a"]
    try:
        read = value_of(text, kinds)
    except ValueError:
        assert isinstance(value, str)
        assert "stopped" in followed
        return
    assert followed == "complete"
    assert read == value or (isinstance(value, str) and not isinstance(read, str))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_arguments_are_those_that_properties_name(spelling: str) -> None:
    """Those of objects within them, too, whatever the notation."""
    inner = {"type": "object", "properties": {"c": {"type": "integer"}}}
    silent = {"type": "object", "properties": {"a": {"type": "integer"}, "b": inner}, "required": ["a"]}
    tools = [{"name": "f", "parameters": silent}]
    closed = calls(format_of(spelling), tools=tools, choice="required", parallel=False)
    assert follow(closed, written(spelling, Call("f", {"a": 1, "b": {"c": 2}}))) == "complete"
    assert "stopped" in follow(closed, written(spelling, Call("f", {"a": 1, "z": 2})))
    assert "stopped" in follow(closed, written(spelling, Call("f", {"a": 1, "b": {"d": 2}})))
    assert "stopped" in follow(closed, written(spelling, Call("f", {"a": 1, "b": {"c": 2, "d": 2}})))


BASE = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("more", "given_more", "is_call"),
    [
        ({"allOf": [{"$ref": "#/properties/a"}, {"required": ["y"]}]}, {"x": 1, "y": 2}, True),
        ({"$ref": "#/properties/a", "required": ["y"]}, {"y": 2}, True),
        ({"not": {"$ref": "#/properties/a"}, "type": "object"}, {"y": 2}, False),
        ({"type": "array", "items": {"not": {"$ref": "#/properties/a"}}}, [{"y": 2}], False),
        ({"$ref": "#/properties/a", "description": "as a"}, {"x": 1}, True),
        ({"$ref": "#/properties/a", "description": "as a"}, {"y": 1}, False),
        ({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}], "description": "as a"}, {"x": 1}, True),
        ({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}], "description": "as a"}, {"y": 1}, False),
        ({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}], "required": ["y"]}, {"y": 1}, True),
        ({"type": "array", "items": {"$ref": "#"}}, [{"a": {"x": 1}}], True),
        ({"type": "array", "items": {"$ref": "#"}}, [{"z": 1}], False),
    ],
)
def test_what_a_reference_leads_to_is_open(spelling: str, more: Any, given_more: Any, is_call: bool) -> None:
    """Unless a reference is all that is said: closed, it was another schema where it was met."""
    schema = {"type": "object", "properties": {"a": BASE, "b": more}}
    processor = calls(format_of(spelling), tools=[{"name": "f", "parameters": schema}], choice="required")
    followed = follow(processor, written(spelling, Call("f", {"b": given_more})))
    assert (followed == "complete") is is_call


B_OR_MORE = {"type": "object", "properties": {"b": {"type": "integer"}}}
NEEDS_C = {"properties": {"c": {"type": "integer"}}, "required": ["c"]}
A_NEEDS_C = {"properties": {"a": NEEDS_C}}
ELSEWHERE: tuple[dict[str, Any], ...] = (
    {"allOf": [A_NEEDS_C]},
    {"anyOf": [A_NEEDS_C]},
    {"oneOf": [A_NEEDS_C]},
    {"if": {"required": ["a"]}, "then": A_NEEDS_C},
    {"dependentSchemas": {"a": A_NEEDS_C}},
    {"patternProperties": {"^a": NEEDS_C}},
    {"$ref": "#/$defs/more", "$defs": {"more": A_NEEDS_C}},
)


@pytest.mark.parametrize("spelling", ["hermes", "pythonic", "olmo3", "qwen3_coder", "glm45", "glm47"])
def test_what_another_keyword_needs_is_not_closed(spelling: str) -> None:
    """Such a tool was refused, since no arguments were left, or its calls lacked some."""
    call = written(spelling, Call("f", {"a": {"c": 2}}))
    for elsewhere in ELSEWHERE:
        schema = {"type": "object", "properties": {"a": B_OR_MORE}, "required": ["a"], **elsewhere}
        tools = [{"name": "f", "parameters": schema}]
        assert follow(calls(format_of(spelling), tools=tools, choice="required"), call) == "complete"
    listed = {"type": "array", "items": B_OR_MORE, "contains": NEEDS_C}
    tools = [{"name": "f", "parameters": {"properties": {"a": listed}, "required": ["a"]}}]
    call = written(spelling, Call("f", {"a": [{"c": 2}]}))
    assert follow(calls(format_of(spelling), tools=tools, choice="required"), call) == "complete"


def test_a_schema_may_say_that_there_are_other_arguments() -> None:
    inner = {"type": "object", "properties": {"c": {"type": "integer"}}}
    silent = {"type": "object", "properties": {"a": {"type": "integer"}, "b": inner}, "required": ["a"]}
    open_ = {**silent, "additionalProperties": {"type": "integer"}}
    others = calls("hermes", tools=[{"name": "f", "parameters": open_}], choice="required", parallel=False)
    assert follow(others, written("hermes", Call("f", {"a": 1, "z": 2}))) == "complete"
