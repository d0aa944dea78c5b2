"""Structural tags and tool calls: what may follow what, judged by plain string matching."""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError

from adapters.calls import FORMATS
from adapters.chain import ProcessorChain, ProcessorFailed, apply_edits, plan_rows
from adapters.contract import ArgumentError, Context
from adapters.processors.structural import StructuralTag
from adapters.processors.tool_calls import ToolCalls
from adapters.vocabulary import Vocabulary

NUM_BYTES, END, PYTHON_TAG, WIDTH = 256, 256, 257, 270
NAMES = {"<|stop|>": END, "<|python_tag|>": PYTHON_TAG}


class ByteTokenizer:
    """One token for each byte, and two special tokens."""

    all_special_ids = (END, PYTHON_TAG)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        raise NotImplementedError("the vocabulary is given the bytes of its tokens")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        raise NotImplementedError("nobody decodes here")

    def __len__(self) -> int:
        return NUM_BYTES + 2


class ByteVocabulary(Vocabulary):
    token_bytes: ClassVar = [*(bytes([i]) for i in range(NUM_BYTES)), *[b""] * (WIDTH - NUM_BYTES)]

    def encode(self, text: str) -> list[int]:
        for name, token_id in NAMES.items():
            before, found, after = text.partition(name)
            if found:
                return [*before.encode(), token_id, *(self.encode(after) if after else [])]
        return list(text.encode())


VOCABULARY = ByteVocabulary(WIDTH, ByteTokenizer(), [END])
CONTEXT = Context(VOCABULARY, end_token_ids=frozenset({END}))
ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TWO = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}


def tag(begin: str, schema: Any, end: str = "</f>") -> dict[str, Any]:
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


def tags(*given: dict[str, Any], triggers: tuple[str, ...] = ("<f=",), **options: bool) -> StructuralTag:
    wanted = {"type": "triggered_tags", "triggers": list(triggers), "tags": list(given), **options}
    return StructuralTag(StructuralTag.Args.model_validate({"format": wanted}), CONTEXT)


def calls(format_: str, **options: Any) -> ToolCalls:
    tools = [{"name": "one", "parameters": ONE}, {"name": "one_more", "parameters": TWO}]
    return ToolCalls(ToolCalls.Args.model_validate({"format": format_, "tools": tools, **options}), CONTEXT)


def allowed(chain: ProcessorChain) -> set[int]:
    """What a row of equal logits has left."""
    logits = torch.zeros(1, WIDTH)
    planned, failures = plan_rows([(0, chain)])
    assert not failures
    apply_edits(logits, planned)
    return set(torch.nonzero(logits[0] > -torch.inf).flatten().tolist())


def follow(processor: Any, text: str) -> str:
    """``complete``: the answer may be ``text``; ``open``: it may begin so; else where it is cut."""
    chain = ProcessorChain([processor], CONTEXT)
    chain.start([1])
    for count, token_id in enumerate(VOCABULARY.encode(text)):
        if token_id not in allowed(chain):
            return f"stopped at {count}"
        chain.accept(token_id, chain.position)
    return "complete" if END in allowed(chain) else "open"


TWO_TAGS = (tag("<f=one>", ONE), tag("<f=one_more>", TWO))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("", "complete"),
        ("Any text, 中文 and <f too.\n<g=", "complete"),
        ("It is <f=", "open"),
        ("It is <f=x", "stopped at 9"),
        ('<f=one>{"a":1}</f>', "complete"),
        ('<f=one>{"a":1}', "open"),
        ('<f=one>{"b"', "stopped at 9"),
        ('So <f=one_more>{"b":true}</f> and <f=one>{"a":-3}</f>.', "complete"),
        ('<f=one>{"a":1}</f><f=one>{"a":2}</f>', "complete"),
    ],
)
def test_a_trigger_binds_and_free_text_does_not(text: str, outcome: str) -> None:
    assert follow(tags(*TWO_TAGS), text) == outcome


def test_the_first_thing_and_the_last() -> None:
    first = tags(*TWO_TAGS, at_least_one=True)
    assert follow(first, "x") == "stopped at 0"
    assert follow(first, '<f=one>{"a":1}</f> and so on <f=one_more>{"b":false}</f>') == "complete"
    only = tags(*TWO_TAGS, at_least_one=True, stop_after_first=True)
    assert follow(only, '<f=one>{"a":1}</f>') == "complete"
    assert follow(only, '<f=one>{"a":1}</f> ') == "stopped at 18"
    last = tags(*TWO_TAGS, stop_after_first=True)
    assert follow(last, "no tag at all") == "complete"
    assert follow(last, 'text <f=one>{"a":1}</f>.') == "stopped at 23"


def test_several_triggers_and_a_special_token() -> None:
    number = {"begin": "<|python_tag|>n=", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": ";"}
    processor = tags(*TWO_TAGS, number, triggers=("<f=", "<|python_tag|>"))
    assert follow(processor, 'a <|python_tag|>n=42; b <f=one>{"a":1}</f>') == "complete"
    assert follow(processor, "<|python_tag|>n=4;") == "stopped at 4"
    assert follow(processor, "<|python_tag|>x") == "stopped at 1"
    assert follow(tags(*TWO_TAGS), "<|python_tag|>") == "stopped at 0"


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk_is_free_text_and_whole_tags(seed: int) -> None:
    """Hot noise with a bias towards the letters of the tags; what comes out is parsed by hand."""
    choose = random.Random(seed)
    chain = ProcessorChain([tags(*TWO_TAGS)], CONTEXT)
    chain.start([1])
    script = "".join(choose.choice(["x", "<f", '<f=one>{"a":', '<f=one_more>{"b":', "é", "<"]) for _ in range(6))
    for token_id in script.encode():
        options = allowed(chain)
        chain.accept(token_id if token_id in options else choose.choice(sorted(options)), chain.position)
        if chain.tokens[-1] == END:
            break
    while chain.tokens[-1] != END and len(chain.tokens) < 2000:
        options = allowed(chain)
        chain.accept(END if END in options else choose.choice(sorted(options)), chain.position)
    assert chain.tokens[-1] == END
    text = bytes(chain.tokens[1:-1]).decode()
    while "<f=" in text:
        section, _, text = text.partition("<f=")[2].partition("</f>")
        name, _, content = section.partition(">")
        (value,) = json.loads(content).items()
        assert {"one": ("a", int), "one_more": ("b", bool)}[name] == (value[0], type(value[1]))


CALLS = {
    "hermes": '<tool_call>\n{"name": "one", "arguments": {"a":1}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "one", "parameters": {"a":1}}',
    "mistral": '[TOOL_CALLS][{"name": "one", "arguments": {"a":1}}]',
    "nemotron_deci": '<TOOLCALL>[{"name": "one", "arguments": {"a":1}}]</TOOLCALL>',
    "phi4": 'functools[{"name": "one", "arguments": {"a":1}}]',
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_each_format(name: str) -> None:
    call = CALLS[name]
    auto, required = calls(name), calls(name, choice="required")
    for processor in (auto, required, calls(name, choice="required", tool="one", parallel=False)):
        assert follow(processor, call) == "complete"
        assert "stopped" in follow(processor, call.replace("one", "two"))
        assert "stopped" in follow(processor, call.replace('"a"', '"b"'))
    assert follow(auto, f"Let me see. {call}") == "complete"
    assert follow(auto, "No call is needed.") == "complete"
    assert follow(required, "Let me see.") == "stopped at 0"
    assert follow(required, "") == "open"
    other = call.replace("one", "one_more").replace('{"a":1}', '{"b":true}')
    assert follow(required, other) == "complete"
    assert "stopped" in follow(calls(name, choice="required", tool="one"), other)


@pytest.mark.parametrize("name", FORMATS)
def test_parallel_calls(name: str) -> None:
    call = CALLS[name]
    inner = call[call.index("{") : call.rindex("}") + 1]
    two = call.replace(inner, f"{inner}, {inner}") if name not in ("hermes", "llama3_json") else f"{call}\n{call}"
    for choice in ("auto", "required"):
        assert follow(calls(name, choice=choice), two) == "complete"
        assert "stopped" in follow(calls(name, choice=choice, parallel=False), two)


@pytest.mark.parametrize("name", FORMATS)
def test_no_call_where_none_may_come(name: str) -> None:
    none = calls(name, choice="none")
    assert follow(none, "No call, <f=one> and {} too.") == "complete"
    assert "stopped" in follow(none, f"Let me see. {CALLS[name]}")


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_of_its_own_beside_calls(name: str) -> None:
    """As tools beside a ``response_format``: calls alone, or what was asked for."""
    either = calls(name, answer={"type": "json_schema", "json_schema": {"const": {"name": "x"}}})
    assert follow(either, CALLS[name]) == "complete"
    assert follow(either, '{"name":"x"}') == "complete"
    for text in ("", "text", '{"name":"y"}', "{" + CALLS[name], f"{CALLS[name]} text", '{"name":"x"}' + CALLS[name]):
        assert follow(either, text) != "complete"
    pattern = calls(name, answer={"type": "regex", "pattern": "[0-9]+"}, parallel=False)
    assert follow(pattern, "42") == follow(pattern, CALLS[name]) == "complete"
    with pytest.raises(ValidationError, match="answer needs the choice auto"):
        calls(name, choice="required", answer={"type": "regex", "pattern": "a"})


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
    assert follow(processor, CALLS["hermes"]) == "complete"
    for other in ("3", "null", "[]", '"a"'):
        assert "stopped" in follow(processor, CALLS["hermes"].replace('{"a":1}', other))


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["array", "null"]}, {"const": 3}, False])
def test_arguments_that_can_be_no_object_are_refused(parameters: Any) -> None:
    with pytest.raises(ArgumentError, match="tools"):
        calls("hermes", tools=[{"name": "one", "parameters": parameters}])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tags": [tag("<g=one>", ONE)]}, "no tag begins with"),
        ({"tags": [*TWO_TAGS, tag("<g=one>", ONE)]}, "exactly one of the triggers"),
        ({"tags": list(TWO_TAGS), "triggers": ["<f=", "<f=o"]}, "exactly one of the triggers"),
        ({"tags": [tag("f=", ONE), tag("<f=", ONE)], "triggers": ["f=", "<f="]}, "no trigger may contain another"),
        ({"tags": [tag("<f=a", False)]}, "no JSON matches"),
        ({"tags": [tag("a<|python_tag|>", ONE)], "triggers": ["a<|python_tag|>"]}, "must begin with it"),
        ({"tags": [tag("<|python_tag|>", ONE)], "triggers": ["<|py"]}, "inside a special token"),
        ({"tags": [tag("<f=a", {"type": "object", "maxProperties": 1, "minProperties": 2})]}, "format: "),
    ],
)
def test_what_cannot_be_enforced_is_refused(given: dict[str, Any], problem: str) -> None:
    wanted = {"type": "triggered_tags", "triggers": ["<f="], **given}
    with pytest.raises(ArgumentError, match=problem):
        StructuralTag(StructuralTag.Args.model_validate({"format": wanted}), CONTEXT)


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match="tool: expected the name of one of the tools"):
        calls("hermes", tool="three")
    with pytest.raises(ValidationError):
        ToolCalls.Args.model_validate({"format": "hermes", "tools": [{"name": 'a"b'}]})
    with pytest.raises(ArgumentError, match="each name once"):
        calls("hermes", tools=[{"name": "one"}, {"name": "one"}])


def test_a_token_against_the_grammar_ends_the_request() -> None:
    chain = ProcessorChain([tags(*TWO_TAGS)], CONTEXT)
    chain.start([1])
    for token_id in b"<f=?":
        chain.accept(token_id, chain.position)
    with pytest.raises(ProcessorFailed, match="do not match the grammar"):
        chain.plan()


@pytest.mark.parametrize(
    "mark",
    [
        '"',
        "\\",
        "/",
        "\\n",
        "\n",
        "\t",
        "\x7f",
        "é",
        "\N{GRINNING FACE}",
        "a\\u0041",
        'i"i',
        "// x",
        "#",
        "%json",
        "\x01",
    ],
)
def test_marks_are_taken_literally(mark: str) -> None:
    begin, end = f"<{mark}>", f"{mark}!"
    processor = tags(tag(f"{begin}{mark}=", ONE, end), triggers=(begin,))
    text = f'A {mark} {begin}{mark}={{"a":1}}{end} {mark}'
    assert follow(processor, text) == "complete"
    for place in range(len(text)):
        if f"{begin}{mark}=" in text[:place] and end not in text[len(f"A {mark} {begin}") : place]:
            assert follow(processor, text[:place]) == "open"
