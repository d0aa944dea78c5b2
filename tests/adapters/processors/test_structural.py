"""Structural tags: what may follow what, judged by plain string matching."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from effort import examples
from followed_texts import CONTEXT, END, allowed, follow, follow_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import ArgumentError
from adapters.processors.structural import StructuralTag

ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TWO = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}


def tag(begin: str, schema: Any, end: str = "</f>") -> dict[str, Any]:
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


def tags(*those: dict[str, Any], triggers: tuple[str, ...] = ("<f=",), **options: bool) -> StructuralTag:
    wanted = {"type": "triggered_tags", "triggers": list(triggers), "tags": list(those), **options}
    return StructuralTag(StructuralTag.Args.model_validate({"format": wanted}), CONTEXT)


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


CONTENTS = (".*", "[ab]*", "a+", "a|ab", "(?s:.)*", "[^b]*", "(?:ab)?", "b*.", "(?i:A)*", "a{1,3}")
ENDS = ("b", "ab", "a", ".", "\n", "bb", "</f>")


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(CONTENTS), st.sampled_from(ENDS), st.text("ab.\n", max_size=6), st.booleans())
def test_a_regex_ends_with_the_first_end(pattern: str, end: str, text: str, is_last: bool) -> None:
    """It went over the end wherever that could be a part of it, and the tag had none."""
    given_tag = {"begin": "<f=>", "content": {"type": "regex", "pattern": pattern}, "end": end}
    processor = tags(given_tag, stop_after_first=is_last)
    for whole in (text, text + end):
        found = [n for n in range(len(whole) + 1) if re.fullmatch(f"(?:{pattern}){re.escape(end)}", whole[:n])]
        is_complete = bool(found) and (not is_last or found[0] == len(whole))
        assert (follow(processor, f"<f=>{whole}") == "complete") is is_complete


def test_a_regex_before_a_special_token_goes_over_its_text() -> None:
    number = {"begin": "<f=>", "content": {"type": "regex", "pattern": ".*"}, "end": "x<|python_tag|>;"}
    assert follow(tags(number), "<f=>axbx<|python_tag|>; and so on") == "complete"
    assert follow(tags(number), "<f=>axb<|python_tag|>") == "stopped at 7"


def test_free_text_does_not_spell_a_special_trigger() -> None:
    """Who reads the answer cannot tell the token from its text, which nothing would hold."""
    number = {"begin": "<|python_tag|>n=", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": ";"}
    for those, triggers in (([number], ("<|python_tag|>",)), ([*TWO_TAGS, number], ("<f=", "<|python_tag|>"))):
        processor = tags(*those, triggers=triggers)
        assert follow_bytes(processor, b"a <|python_tag") == "complete"
        assert follow_bytes(processor, b"a <|python_tag|>") == "stopped at 15"
    assert follow_bytes(processor, b'a <f=one>{"a":1}</f> <|python_tag|>') == "stopped at 34"
    assert follow_bytes(processor, b'a <|python_tag|> <f=one>{"a":1}</f>') == "stopped at 15"


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


@pytest.mark.parametrize(
    ("changes", "problem"),
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
def test_what_cannot_be_enforced_is_refused(changes: dict[str, Any], problem: str) -> None:
    wanted = {"type": "triggered_tags", "triggers": ["<f="], **changes}
    with pytest.raises(ArgumentError, match=problem):
        StructuralTag(StructuralTag.Args.model_validate({"format": wanted}), CONTEXT)


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
