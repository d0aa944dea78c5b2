"""Thinking and the answer behind it, where the front door makes the prompt itself."""

from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import vocabulary_like
from transformers import PreTrainedTokenizerFast

from worker.frontdoor.fields import CHAT
from worker.frontdoor.openengine.exchange import Engines, Request, _prepared
from worker.frontdoor.openengine.prompts import Prompts
from worker.frontdoor.openengine.thinking import PARSERS

TEMPLATE = "{{ messages[0].content }}{{ opening }}"


def parts_of(opening: str, parser: str, text: str) -> list[tuple[str, str]]:
    """The parts of an answer to a prompt whose chat template ends with ``opening``."""
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
    prepared = _prepared(engines, Request("POST", CHAT, {}, b""), body)
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


def test_an_answer_without_thinking() -> None:
    assert parts_of("", "qwen3", "Yes") == [("content", "Yes")]
