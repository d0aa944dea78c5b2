"""Separation of a model's thinking from its answer, as text comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from adapters.vocabulary import ReasoningTokens, Vocabulary
from adapters.vocabulary.text_match import TextMatcher
from adapters.vocabulary.thinking_tags import KNOWN_TAGS
from worker.frontdoor.calls.marks import held_back

Part = Literal["reasoning_content", "content"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """The way in which a model marks its thinking.

    Attributes:
        begin: Text before it.
        end: Text behind it.
        begins_inside: Whether an answer begins with thinking that no text marks.
    """

    begin: str
    end: str
    begins_inside: bool = False


_PLAIN, _MISTRAL = (Thinking(*tags) for tags in KNOWN_TAGS[:2])

PARSERS: dict[str, Thinking] = {
    "basic": _PLAIN,
    "qwen3": _PLAIN,
    "qwen": _PLAIN,
    "glm45": _PLAIN,
    "deepseek_v3": _PLAIN,
    "deepseek_r1": Thinking(*KNOWN_TAGS[0], begins_inside=True),
    "step3": Thinking(*KNOWN_TAGS[0], begins_inside=True),
    "mistral": _MISTRAL,
    "kimi": Thinking("◁think▷", "◁/think▷"),
}
"""Names of Dynamo's parsers of reasoning whose thinking is text between two tags."""


class ThinkingSplit:
    """Splits the text of one answer.

    Args:
        thinking: Marks of the thinking.
        is_inside: Whether the answer begins with thinking.
        may_open: Whether that thinking may have its tag before it, which is then left out.
    """

    def __init__(self, thinking: Thinking, *, is_inside: bool, may_open: bool = False) -> None:
        self._thinking = thinking
        self._is_inside = is_inside
        self._may_open = may_open
        self._held = ""

    def feed(self, text: str, *, ends: bool) -> Iterator[tuple[Part, str]]:
        """The parts that are final with the next piece of the text, none of them empty.

        Args:
            text: The piece.
            ends: Whether it is the last.
        """
        self._held += text
        if self._may_open and not self._opened(ends):
            return
        while (place := self._held.find(self._next_tag)) >= 0:
            yield from self._part(self._held[:place])
            self._held = self._held[place + len(self._next_tag) :]
            self._is_inside = not self._is_inside
        keep = 0 if ends else held_back(self._held, self._next_tag)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        yield from self._part(shown)

    def _opened(self, ends: bool) -> bool:
        """Whether it is certain how the answer begins; a tag there is dropped."""
        begin, text = self._thinking.begin, self._held.lstrip()
        if not ends and len(text) < len(begin) and begin.startswith(text):
            return False
        self._may_open = False
        if text.startswith(begin):
            self._held = self._held.replace(begin, "", 1)
        return True

    @property
    def _next_tag(self) -> str:
        return self._thinking.end if self._is_inside else self._thinking.begin

    def _part(self, text: str) -> Iterator[tuple[Part, str]]:
        if text:
            yield ("reasoning_content" if self._is_inside else "content"), text


def reasoning_tokens(
    vocabulary: Vocabulary, thinking: Thinking, *, is_inside: bool, may_open: bool = False
) -> ReasoningTokens:
    """Counts the thinking of one answer.

    Args:
        vocabulary: Tokens of the model, with their texts.
        thinking: Marks of the thinking.
        is_inside: Whether the answer begins with thinking.
        may_open: See `ThinkingSplit`.
    """
    start, end = (_matcher(vocabulary, tag) for tag in (thinking.begin, thinking.end))
    blank = vocabulary.derived("thinking.blank", lambda: _blank(vocabulary)) if may_open else None
    return ReasoningTokens(start, end, is_inside=is_inside, blank=blank)


def _blank(vocabulary: Vocabulary) -> frozenset[int]:
    """Tokens of white space alone."""
    return frozenset(token_id for token_id, text in enumerate(vocabulary.token_bytes) if text.isspace())


def _matcher(vocabulary: Vocabulary, tag: str) -> TextMatcher:
    """Finds a tag as the one token that it is, else in the bytes of tokens, however it is split."""

    def make() -> TextMatcher:
        ids = vocabulary.tag(tag)
        return TextMatcher.of_ids(ids) if ids else TextMatcher.of_text(vocabulary, tag.encode())

    return vocabulary.derived(f"thinking.{tag}", make)
