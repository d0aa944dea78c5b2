"""The reader of calls finds what comes, and looks at a text in proportion to its length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_calls import Call, written

from adapters.calls import FORMATS
from worker.frontdoor.calls import CallArguments, CallBegin, CallParser, Kinds, TextPiece
from worker.frontdoor.calls.json_text import json_value
from worker.frontdoor.calls.reader import Cut, Mismatch, TextReader

TOOLS: dict[str, Kinds] = {"f": {"text": {"string"}}}
MANY = 1000
STEP = st.one_of(st.text("ab", max_size=6), st.integers(-4, 4), st.sampled_from([("ab",), ("aab",), ("b",), ()]))
"""A text that comes, characters to go on or back, a text to look for, or none to forget."""


@given(st.lists(STEP, max_size=30))
def test_a_text_is_found_where_it_is_first(steps: list[Any]) -> None:
    reader = TextReader()
    for step in steps:
        if isinstance(step, str):
            reader.add(step)
        elif isinstance(step, int):
            reader.position = max(0, min(reader.position + step, reader.position + len(reader.ahead)))
        elif step:
            assert reader.find(step[0]) == reader.ahead.find(step[0])
        else:
            reader.forget()


@pytest.mark.parametrize(
    ("name", "first", "repeated"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"text": "', "<tool_call>"),
        ("qwen3_coder", "", "<tool_call>\n<function=f>\n<parameter=text>\n"),
        ("glm47", "", "<tool_call>f<arg_key>"),
    ],
)
def test_calls_that_are_none_do_not_copy_the_rest(
    name: str, first: str, repeated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each beginning of a call at the end of a long answer copied all that was behind it."""
    num_copied = 0

    def counted(reader: TextReader) -> str:
        nonlocal num_copied
        found = reader._text[reader.position :]
        num_copied += len(found)
        return found

    monkeypatch.setattr(TextReader, "ahead", property(counted))
    parser, text = CallParser(FORMATS[name], TOOLS, enforced=False), "x" + first + repeated * MANY
    pieces = parser.feed(text) + parser.end("stop")
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text
    assert num_copied < 20 * len(text)


@pytest.mark.parametrize("enforced", [True, False])
def test_arguments_of_a_call_that_is_certain_come_at_once(enforced: bool) -> None:
    parser = CallParser(FORMATS["hermes"], TOOLS, enforced=enforced)
    pieces = parser.feed('<tool_call>\n{"name": "f", "arguments": {"text": "abc')
    assert pieces == ([CallBegin(0, "f"), CallArguments(0, '{"text": "abc')] if enforced else [])
    pieces = parser.feed('"}}\n</tool_call>') + parser.end("stop")
    assert "".join(each.text for each in pieces if isinstance(each, CallArguments)).endswith('"}')


@pytest.mark.parametrize(
    ("kinds", "begun", "held"),
    [
        ({"string", "null"}, "nul", True),
        ({"string", "null"}, "nulls and more", False),
        ({"string", "number"}, "-12.5", True),
        ({"string", "number"}, "-12.5 m", False),
        ({"string", "null"}, "-12.5", False),
        ({"string", "boolean", "array"}, "The answer", False),
    ],
)
def test_a_text_of_several_types_waits_while_it_may_be_another(kinds: Any, begun: str, held: bool) -> None:
    """All of it waited for its end, however long it was, where the schema allows null beside it."""
    parser = CallParser(FORMATS["qwen3_coder"], {"f": {"text": kinds}})
    pieces = parser.feed(f"<tool_call>\n<function=f>\n<parameter=text>\n{begun}\n")
    text = "".join(each.text for each in pieces if isinstance(each, CallArguments))
    assert text == ('{"text": ' if held else f'{{"text": "{begun}')


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.ends])
def test_what_follows_the_calls_that_end_an_answer_is_no_text(name: str, enforced: bool) -> None:
    """The beginning of another call, which the answer was too long for; it may be text else."""
    call = written(name, Call("f", {"text": "a"}))
    parser = CallParser(FORMATS[name], TOOLS, enforced=enforced)
    pieces = parser.feed(call) + parser.feed(" and more") + parser.end("length")
    assert [each.name for each in pieces if isinstance(each, CallBegin)] == ["f"]
    assert any(isinstance(each, TextPiece) for each in pieces) == (not enforced)


@pytest.mark.parametrize(
    "text",
    [r'"\u12"', r'"\u12g4"', r'"\x"', '"\t"', "01", "-01", "1.", ".5", "1e", "-", "+1", "tru", "None", "[1,]", "{,}"],
)
def test_what_is_no_json_is_no_value(text: str) -> None:
    reader = TextReader()
    reader.add(text + " ")
    reader.ended = True
    with pytest.raises(Mismatch):
        list(json_value(reader, list[str]().append))


@pytest.mark.parametrize("text", [r'"\ud83d\ude00"', r'"a\u00e9\n"', "-10.5e+3 ", "true ", '{"a": [0, ""]}'])
def test_no_escape_number_or_word_is_cut(text: str) -> None:
    """Whatever comes so far: put together with an end it is JSON."""
    reader, found = TextReader(), list[str]()
    running = json_value(reader, found.append)
    for character in text:
        next(running, None)
        reader.add(character)
        begun = "".join(found)
        assert not begun.endswith("\\")
        if begun.startswith('"'):
            json.loads(begun if begun.endswith('"') and len(begun) > 1 else begun + '"').encode()
    reader.ended = True
    next(running, None)
    assert "".join(found) == text.strip()


def test_a_value_that_ends_within_an_escape_is_cut() -> None:
    reader = TextReader()
    reader.add(r'"\u12')
    reader.ended = True
    with pytest.raises(Cut):
        list(json_value(reader, list[str]().append))
