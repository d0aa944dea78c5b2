"""Scopes: processors limited to the thinking section or to the answer.

A scoped processor sees the prompt and the generated tokens inside its scope; the tags themselves
belong to neither section. So ``min_tokens`` with scope ``answer`` counts answer tokens, and a
grammar with scope ``answer`` begins after the closing tag.

The answer begins after the thinking section if the model thinks, else with the first token. The
first token decides: where the prompt's last turn has neither opened nor closed a section, the model
may open one with its first token, whatever processors with scope ``answer`` mask or force.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

Scope = Literal["all", "thinking", "answer"]


class ThinkingTracker:
    """Whether the next token is inside a thinking section, for every position of one choice.

    Args:
        start: Ids of the opening tag, at least one.
        end: Ids of the closing tag, at least one.
        special_ids: Ids of special tokens: the prompt's last turn begins after the last of them.

    Attributes:
        thinking: True while inside a section.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int], special_ids: AbstractSet[int] = frozenset()) -> None:
        if not start or not end:
            raise ValueError("a thinking section needs an opening and a closing tag")
        self._start, self._end = list(start), list(end)
        self._turn_marks = special_ids - {*start, *end}
        self._tail_length = max(len(start), len(end))
        self.reset(())

    def reset(self, prompt: Sequence[int]) -> None:
        """Begin after ``prompt``; tags of its last turn count, as templates may open a section."""
        turn = prompt[turn_begin(prompt, self._turn_marks) :]
        opened = _last_index(turn, self._start)
        closed = _last_index(turn, self._end)
        self.thinking = opened > closed
        self._may_open_first = opened < 0 and closed < 0
        self._tail = list(prompt[-self._tail_length :])
        self._states: list[bool] = []  # `thinking` before each generated token, for rewinding
        self._tokens: list[int] = []
        self._prompt_tail = list(self._tail)

    @property
    def may_open(self) -> bool:
        """Whether the next token is the answer's first, and may open a thinking section instead."""
        return self._may_open_first and not self._tokens

    def accept(self, token_id: int) -> bool | None:
        """Take the next token: True if it is thinking, False if answer, None if it ends a tag."""
        self._states.append(self.thinking)
        self._tokens.append(token_id)
        self._tail = [*self._tail, token_id][-self._tail_length :]
        tag = self._end if self.thinking else self._start
        if self._tail[-len(tag) :] == tag:
            self.thinking = not self.thinking
            return None
        return self.thinking

    def rewind(self, num_generated: int) -> None:
        """Forget every generated token from index ``num_generated`` on."""
        if num_generated >= len(self._tokens):
            return
        self.thinking = self._states[num_generated]
        del self._states[num_generated:], self._tokens[num_generated:]
        recent = self._tokens[-self._tail_length :]
        self._tail = [*self._prompt_tail, *recent][-self._tail_length :]


def turn_begin(prompt: Sequence[int], turn_marks: AbstractSet[int]) -> int:
    """Index after the last of ``turn_marks`` in ``prompt``: where the last turn begins."""
    for index in range(len(prompt) - 1, -1, -1):
        if prompt[index] in turn_marks:
            return index + 1
    return 0


def _last_index(tokens: Sequence[int], tag: list[int]) -> int:
    """Index where ``tag`` last begins in ``tokens``, -1 if nowhere."""
    first = tag[0]
    for index in range(len(tokens) - len(tag), -1, -1):
        if tokens[index] == first and list(tokens[index : index + len(tag)]) == tag:
            return index
    return -1
