"""Scopes: processors limited to the thinking section or to the answer.

A scoped processor sees the prompt and the generated tokens inside its scope; the tags themselves
belong to neither section. So ``min_tokens`` with scope ``answer`` counts answer tokens, and a
grammar with scope ``answer`` begins after the closing tag. A tag of several tokens is matched in
their bytes, however the model splits it; once it is complete, scoped processors rewind its
tokens.

The answer begins after the thinking section if the model thinks, else with the first token. The
first token decides: where the prompt's last turn has neither opened nor closed a section, the model
may open one with its first token, whatever processors with scope ``answer`` mask or force. An
opening tag of several tokens stays allowed up to its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

from adapters.vocabulary import Vocabulary
from adapters.vocabulary.text_match import TextMatcher, continuations, tag_matcher

Scope = Literal["all", "thinking", "answer"]


class _State(NamedTuple):
    """State of the tracker at one position of the history.

    Attributes:
        thinking: Inside a section.
        matched: Symbols of the tag that ends this state (the closing tag inside a section, else the
            opening one) at the end of the history.
        is_opening: The whole answer so far is the beginning of the opening tag; it may be empty.
    """

    thinking: bool
    matched: int
    is_opening: bool


class ThinkingTracker:
    """Whether the next token is inside a thinking section, for every position of one choice.

    Args:
        start: Matches the opening tag.
        end: Matches the closing tag.
        special_ids: Ids of special tokens: the prompt's last turn begins after the last of them.
        opening: Token that continues the opening tag, for each number of its symbols.

    Attributes:
        tokens: The generated tokens.
        tag_length: Number of tokens of the tag completed last.
    """

    def __init__(
        self,
        start: TextMatcher,
        end: TextMatcher,
        special_ids: AbstractSet[int] = frozenset(),
        opening: Sequence[int] = (),
    ) -> None:
        self._start, self._end = start, end
        self._turn_marks = special_ids - start.pieces.keys() - end.pieces.keys()
        self._opening = opening
        self.reset(())

    @classmethod
    def of(cls, vocabulary: Vocabulary, start: Sequence[int], end: Sequence[int]) -> ThinkingTracker:
        """A tracker of the tags with the ids ``start`` and ``end``.

        Raises:
            ValueError: one of them is empty.
        """
        if not start or not end:
            raise ValueError("a thinking section needs an opening and a closing tag")
        opening = tag_matcher(vocabulary, start)
        return cls(
            opening,
            tag_matcher(vocabulary, end),
            vocabulary.special_token_ids,
            continuations(vocabulary, start, opening),
        )

    def reset(self, prompt: Sequence[int]) -> None:
        """Begin after ``prompt``; tags of its last turn count, as templates may open a section."""
        thinking = seen = False
        opening = closing = 0
        for token_id in prompt[turn_begin(prompt, self._turn_marks) :]:
            opening, opened = self._start.step(opening, token_id)
            closing, closed = self._end.step(closing, token_id)
            if opened >= 0 or closed >= 0:
                thinking, seen = opened >= 0, True
                opening = closing = 0
        self._state = _State(thinking, closing if thinking else opening, not thinking and not seen)
        self._states: list[_State] = []  # before each generated token, for rewinding
        self.tokens: list[int] = []
        self.tag_length = 0

    @property
    def thinking(self) -> bool:
        """True while inside a section."""
        return self._state.thinking

    @property
    def opening_id(self) -> int | None:
        """The token that continues the opening tag, else None.

        A token only where the answer so far is a beginning of the tag, empty or not: the model may
        open a section there.
        """
        return self._opening[self._state.matched] if self._state.is_opening and self._opening else None

    def accept(self, token_id: int) -> bool | None:
        """Take the next token: True if it is thinking, False if answer, None if it ends a tag.

        The tag's tokens, `tag_length` with this one, are neither.
        """
        state = self._state
        tag = self._end if state.thinking else self._start
        matched, before = tag.step(state.matched, token_id)
        self._states.append(state)
        self.tokens.append(token_id)
        if before >= 0:
            self.tag_length = self._num_tokens(tag, before)
            self._state = _State(not state.thinking, 0, False)
            return None
        goes_on = matched == state.matched + len(tag.pieces.get(token_id, ())) > state.matched
        self._state = _State(state.thinking, matched, state.is_opening and goes_on)
        return state.thinking

    def _num_tokens(self, tag: TextMatcher, before: int) -> int:
        """Generated tokens that hold a part of the tag that the newest one has completed."""
        index = len(self.tokens) - 1
        while before > 0 and index > 0:
            index -= 1
            before -= len(tag.pieces[self.tokens[index]])
        return len(self.tokens) - index

    def rewind(self, num_generated: int) -> None:
        """Rewind to the first ``num_generated`` generated tokens."""
        if num_generated >= len(self.tokens):
            return
        self._state = self._states[num_generated]
        del self._states[num_generated:], self.tokens[num_generated:]


def turn_begin(prompt: Sequence[int], turn_marks: AbstractSet[int]) -> int:
    """Index after the last of ``turn_marks`` in ``prompt``: where the last turn begins."""
    for index in range(len(prompt) - 1, -1, -1):
        if prompt[index] in turn_marks:
            return index + 1
    return 0
