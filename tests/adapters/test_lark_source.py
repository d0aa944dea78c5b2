"""What is a name of a token in a Lark grammar, and what is a text, is as llguidance reads it."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.grammars.compiler import GrammarRefused, compile_grammar, load_tokenizer
from adapters.grammars.lark import as_grammar, lexemes, token_ranges, with_ids, without_literals

NAME = "<|tool|>"
TOKENIZER = load_tokenizer([*(bytes([i]) for i in range(256)), b""])
WORDS = st.sampled_from([NAME, "a", "<", ">", "/", '"', "\\", "#", "//", "%json", "{", "é", " "])
TEXT = st.lists(WORDS, max_size=5).map("".join)


def regex(text: str) -> str:
    """A regular expression with ``text`` in it, between an escaped slash and a backslash."""
    return "/\\/" + re.sub(r"[/{\\]", "x", text) + "\\\\/"


LITERALS = TEXT.map(partial(json.dumps, ensure_ascii=False)) | TEXT.map(regex)
VALUES = st.recursive(
    st.one_of(TEXT, st.integers(-9, 9), st.none()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
JSON = VALUES.map(lambda value: f"%json {json.dumps({'const': value}, indent=1)}")
NAMES = st.sampled_from([NAME, "<[5]>", "<[1-3,256]>"])
COMMENTS = TEXT.map(lambda text: f"// {text}") | TEXT.map(lambda text: f"# {text}")


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.one_of(LITERALS, JSON, NAMES), COMMENTS | st.just("")), min_size=1, max_size=5))
def test_the_parts_of_a_source_are_found(parts: list[tuple[str, str]]) -> None:
    """Each part stands in a rule of its own, with a comment behind it."""
    source, expected = "start: a0", []
    for number, (part, comment) in enumerate(parts):
        source += f"\na{number}: {part} a{number + 1} {comment}"
        expected += [(part, part.startswith("<"))]
        expected += [(comment, False)] if comment else []
    source += f'\na{len(parts)}: "end"'
    expected += [('"end"', False)]
    found = [(source[start:end], kind == "token") for kind, start, end in lexemes(source)]
    assert found == expected
    named = with_ids(source, lambda name: {NAME: 256}.get(name))
    assert [named[start:end] for _, start, end in lexemes(named)] == [
        "<[256]>" if part == NAME else part for part, _ in expected
    ]
    compile_grammar(TOKENIZER, as_grammar(named))  # llguidance finds the same parts


def test_unknown_token_names_are_refused_and_literals_removed() -> None:
    with pytest.raises(ValueError, match="names the token <x>, which this model does not have"):
        with_ids("start: <x>", lambda name: None)
    source = 'start: "a[b=1]" x[c=2] // d=3\n%llguidance {"e=4": 1} <f=5> /g=6/'
    assert without_literals(source) == "start:  x[c=2] \n  "
    assert list(token_ranges("start: <[1,3-5]> <[^1]> <[*]> <[,7]>")) == [
        (range(1, 2), range(3, 6)),
        (range(7, 8),),
    ]


def test_what_llguidance_refuses_is_refused() -> None:
    for source in ('start: "a', "start: <a b>", "start: /a", "start: <[1-]>"):
        with pytest.raises((GrammarRefused, ValueError)):
            compile_grammar(TOKENIZER, as_grammar(with_ids(source, lambda name: 1)))


@pytest.mark.parametrize(
    "hostile", ['"' + '\\"' * 500_000, "/" + "\\/" * 500_000, "<" + "a" * 1_000_000, "<a> " * 250_000]
)
def test_a_long_source_is_read_once(hostile: str) -> None:
    asked: list[str] = []

    def id_of(name: str) -> int:
        asked.append(name)
        return 5

    if hostile.startswith("<"):
        assert with_ids(hostile, id_of) in (hostile, "<[5]> " * 250_000)
        assert asked in ([], ["<a>"])
    else:
        with pytest.raises(ValueError, match="expected an end of what begins at"):
            with_ids(hostile, id_of)
