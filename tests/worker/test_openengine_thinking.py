"""Thinking and the answer behind it, where the front door makes the prompt itself."""

from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import vocabulary_like
from transformers import PreTrainedTokenizerFast

from worker.frontdoor.fields import CHAT
from worker.frontdoor.openengine.exchange import Engines, Request, _Prepared, _prepared
from worker.frontdoor.openengine.prompts import Prompts
from worker.frontdoor.openengine.thinking import PARSERS

TEMPLATE = "{{ messages[0].content }}{{ opening }}"


def prepared_for(opening: str, parser: str) -> _Prepared:
    """A request whose prompt's chat template ends with ``opening``."""
    own: Any = vocabulary_like("qwen").tokenizer
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=own.backend_tokenizer, chat_template=TEMPLATE
    )
    engines = Engines(None, Prompts(tokenizer), PARSERS[parser], 0)  # type: ignore[arg-type]  # not asked
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "chat_template_kwargs": {"opening": opening},
    }
    return _prepared(engines, Request("POST", CHAT, {}, b""), body)


def parts_of(opening: str, parser: str, text: str) -> list[tuple[str, str]]:
    """The parts of an answer to such a request."""
    prepared = prepared_for(opening, parser)
    assert prepared.split is not None
    return [*prepared.split.feed(text, ends=True)]


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_a_prompt_that_closes_thinking_has_an_answer(parser: str) -> None:
    """All of it was thinking with a parser whose answers begin with it: the answer was empty."""
    assert parts_of("<think>\n\n</think>\n\n", parser, "Yes") == [("content", "Yes")]


@pytest.mark.parametrize(
    ("parser", "opening"), [("deepseek_r1", ""), ("deepseek_r1", "<think>\n"), ("qwen3", "<think>")]
)
def test_thinking_that_the_prompt_or_the_answer_begins(parser: str, opening: str) -> None:
    assert parts_of(opening, parser, "Hm</think>Yes") == [("reasoning_content", "Hm"), ("content", "Yes")]


OWN_TAG = [
    (["<think>Hm</think>Yes"], "Hm", "Yes"),
    (["<th", "ink>", "\nHm", "</th", "ink>Yes"], "\nHm", "Yes"),
    (["\n", "<think>Hm</think>Yes"], "\nHm", "Yes"),
    (["<", "b>"], "<b>", ""),
    (["<think>Hm <think></think>Yes"], "Hm <think>", "Yes"),
    (["<thi"], "<thi", ""),
]


@pytest.mark.parametrize(("pieces", "thought", "text"), OWN_TAG)
def test_thinking_that_needs_no_tag_may_have_one(pieces: list[str], thought: str, text: str) -> None:
    """As DeepSeek-R1's where its template does not open it: the tag was in the thought."""
    prepared = prepared_for("", "deepseek_r1")
    assert prepared.split is not None
    assert prepared.reasoning is not None
    made = {"reasoning_content": "", "content": ""}
    for number, piece in enumerate(pieces):
        for name, part in prepared.split.feed(piece, ends=number == len(pieces) - 1):
            made[name] += part
    assert made == {"reasoning_content": thought, "content": text}


@pytest.mark.parametrize(
    ("texts", "counted"),
    [
        (["<think>", "Hm", "</think>", "Yes"], ["Hm"]),
        (["Hm", "</think>", "Yes"], ["Hm"]),
        (["\n", "\n", "<think>", "\n", "Hm", "</think>", "Yes"], ["\n", "\n", "\n", "Hm"]),
        (["Hm", "<think>"], ["Hm", "<think>"]),
    ],
)
def test_a_tag_that_is_not_needed_is_not_counted(texts: list[str], counted: list[str]) -> None:
    prepared, vocabulary = prepared_for("", "deepseek_r1"), vocabulary_like("qwen")
    assert prepared.reasoning is not None
    for text in texts:
        prepared.reasoning.feed(vocabulary.encode(text))
    assert prepared.reasoning.count == sum(len(vocabulary.encode(text)) for text in counted)


def test_an_answer_without_thinking() -> None:
    assert parts_of("", "qwen3", "Yes") == [("content", "Yes")]
