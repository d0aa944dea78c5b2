"""Contents of messages are texts or lists of parts, as the chat template takes them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from worker.frontdoor.openengine.prompts import Prompts
from worker.runtimes.direct.contents import fitted, normalised, takes_texts

TEXTS = "{% for each in messages %}{{ each.content }}{% endfor %}"
PARTS = (
    "{% for each in messages %}{% for part in each.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)
BOTH = (
    "{% for each in messages %}{% if each.content is string %}"
    + TEXTS
    + "{% else %}"
    + PARTS
    + "{% endif %}{% endfor %}"
)
RAISES = "{{ raise_exception('no') }}"


def tokenizer_with(template: str) -> Any:
    backend = Tokenizer(WordLevel({"[UNK]": 0, "two": 1, "texts": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(("template", "expected"), [(TEXTS, True), (PARTS, False), (BOTH, True), (RAISES, True)])
def test_a_template_takes_texts_unless_it_shows_parts_alone(template: str, expected: bool) -> None:
    assert takes_texts(tokenizer_with(template)) is expected
    assert takes_texts(tokenizer_with(TEXTS), template) is expected


def test_messages_are_those_that_templates_know() -> None:
    user = {"role": "user", "content": None}
    given = [{"role": "developer", "content": "a"}, {"role": "assistant"}, user, 3]
    assert normalised(given) == [{"role": "system", "content": "a"}, {"role": "assistant", "content": ""}, user, 3]
    assert normalised("hello") == "hello"


@pytest.mark.parametrize("parsed", [{"a": 1}, None])
def test_what_a_client_parsed_is_not_shown_to_the_model(parsed: dict[str, int] | None) -> None:
    """The openai package sends it back, and some templates write a whole call as JSON."""
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer: dict[str, Any] = {"role": "assistant", "content": "a", "tool_calls": [call]}
    back = {**call, "function": {**call["function"], "parsed_arguments": parsed}}
    assert normalised([{**answer, "parsed": parsed, "tool_calls": [back, 3]}]) == [{**answer, "tool_calls": [call, 3]}]
    assert back["function"]["parsed_arguments"] == parsed


def test_other_contents_stay_as_they_are() -> None:
    picture = {"role": "user", "content": [{"type": "image"}, *parts("a")]}
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    for texts in (True, False):
        assert fitted([picture, call, 3], texts) == [picture, call, 3]
        assert fitted("hello", texts) == "hello"


@pytest.mark.parametrize("template", [TEXTS, PARTS], ids=["texts", "parts"])
@pytest.mark.parametrize("content", ["two\ntexts", parts("two", "texts")], ids=["text", "parts"])
def test_a_prompt_shows_the_content_in_either_form(template: str, content: Any) -> None:
    """A text was left out of the prompt where the template shows lists of parts alone."""
    tokenizer = tokenizer_with(template)
    request = Prompts(tokenizer).request({"messages": [{"role": "user", "content": content}]})
    shown = "twotexts" if template == PARTS and isinstance(content, list) else "two\ntexts"
    assert request.fields["token_ids"] == tokenizer.encode(shown, add_special_tokens=False)


CALLS = (
    "{% for each in messages %}{{ '' + each.content }}{% for call in each.tool_calls %}"
    "{% for name in call.function.arguments %}{{ name }}{% endfor %}{% endfor %}{% endfor %}"
)
"""Joins a content with a text, and shows the names of a call's arguments."""


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=["absent", "null", "empty"])
def test_calls_that_come_back_are_shown_as_by_a_frontend(content: dict[str, Any]) -> None:
    """Over NATS the arguments were a text, and without a content the template failed."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"two": "texts"}'}}
    tokenizer = tokenizer_with(CALLS)
    messages = [{"role": "assistant", **content, "tool_calls": [call]}]
    request = Prompts(tokenizer).request({"messages": messages})
    assert request.fields["token_ids"] == tokenizer.encode("two", add_special_tokens=False)
