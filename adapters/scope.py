"""Scopes: a processor limited to the thinking section or to the answer lives only there.

It sees the prompt, and of the generated tokens only those inside its scope; the tags themselves belong to
neither. So ``min_tokens`` with scope ``answer`` counts answer tokens, and a grammar with scope ``answer`` begins
after the closing tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Scope = Literal["all", "thinking", "answer"]


class ThinkingTracker:
    """Whether the next token is inside a thinking section, for every position of one choice.

    Args:
        start: Ids of the opening tag, at least one.
        end: Ids of the closing tag, at least one.

    Attributes:
        thinking: True while inside a section.
        ever: True once a section was opened, in the prompt or since.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int]) -> None:
        if not start or not end:
            raise ValueError("a thinking section needs an opening and a closing tag")
        self._start, self._end = list(start), list(end)
        self._tail_length = max(len(start), len(end))
        self.reset(())

    def reset(self, prompt: Sequence[int]) -> None:
        """Begin after ``prompt``, whose own tags count (chat templates may open a section)."""
        opened = _last_index(prompt, self._start)
        closed = _last_index(prompt, self._end)
        self.thinking = opened > closed
        self.ever = opened >= 0
        self._tail = list(prompt[-self._tail_length :])
        # Before each generated token: (thinking, ever); what rewinding goes back to. `_inside[i]` is token i's scope.
        self._states: list[tuple[bool, bool]] = []
        self._tokens: list[int] = []
        self._prompt_tail = list(self._tail)

    def accept(self, token_id: int) -> bool | None:
        """Take the next token. True: it is thinking; False: it is answer; None: it completes a tag."""
        self._states.append((self.thinking, self.ever))
        self._tokens.append(token_id)
        self._tail = [*self._tail, token_id][-self._tail_length :]
        tag = self._end if self.thinking else self._start
        if self._tail[-len(tag) :] == tag:
            self.thinking = not self.thinking
            self.ever = True
            return None
        return self.thinking

    def rewind(self, num_generated: int) -> None:
        """Forget every generated token from index ``num_generated`` on."""
        if num_generated >= len(self._tokens):
            return
        self.thinking, self.ever = self._states[num_generated]
        del self._states[num_generated:], self._tokens[num_generated:]
        recent = self._tokens[-self._tail_length :]
        self._tail = [*self._prompt_tail, *recent][-self._tail_length :]


def _last_index(tokens: Sequence[int], tag: list[int]) -> int:
    """Index where ``tag`` last begins in ``tokens``, -1 if nowhere."""
    first = tag[0]
    for index in range(len(tokens) - len(tag), -1, -1):
        if tokens[index] == first and list(tokens[index : index + len(tag)]) == tag:
            return index
    return -1
