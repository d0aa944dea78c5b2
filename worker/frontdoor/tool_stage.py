"""Stage of a chat's stream that makes tool calls of the text in which a model writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from worker.frontdoor.calls import CallArguments, CallBegin, CallParser, Piece, TextPiece, ThinkingPiece

Chunk = dict[str, Any]
"""A ``chat.completion.chunk`` of OpenAI's API."""

_ONCE = ("usage", "nvext")
"""Keys of a chunk that are in the last one of those that are made of it."""

_WRITTEN = ("role", "content", "reasoning_content")
"""Keys of a delta that the stage writes itself."""


class ToolStage:
    """Turns chunks with text into chunks with text and tool calls.

    A call's first delta has its index, id and name, and the next ones parts of its arguments, which
    are always a beginning of JSON. Each token's log probabilities are in the first chunk that is
    made of the token's own, also those of tokens that are no text. A ``finish_reason`` of ``stop``
    becomes ``tool_calls`` if there are calls and the last one is complete; ``length`` stays. Calls
    that a chunk already has pass. Thinking in the middle of a call waits for the end of the call.

    The text of a choice gives the same deltas however it is split into chunks, but for the places
    where they are split.

    Args:
        parser: Maker of the parser of one choice.
        short_ids: Ids of nine letters and digits, as Mistral's chat templates demand, instead of
            ``call_`` and 24.
    """

    def __init__(self, parser: Callable[[], CallParser], *, short_ids: bool = False) -> None:
        self._parser = parser
        self._short_ids = short_ids
        self._choices: dict[int, _Choice] = {}

    def feed(self, chunk: Chunk) -> list[Chunk]:
        """The chunks for the client that the next one gives, in order; it may be none."""
        if not chunk.get("choices"):
            return [chunk]
        made = [each for choice in chunk["choices"] for each in self._of(choice, str(chunk.get("id"))).deltas(choice)]
        if not made and any(chunk.get(key) for key in _ONCE):
            made = [{**chunk["choices"][-1], "delta": {}}]
        chunks = [{**chunk, "choices": [each]} for each in made]
        for each in chunks[:-1]:
            each.update({key: None for key in _ONCE if key in each})
        return chunks

    def _of(self, choice: dict[str, Any], request_id: str) -> _Choice:
        index = choice.get("index", 0)
        if index not in self._choices:
            self._choices[index] = _Choice(self._parser(), f"{request_id}:{index}", self._short_ids)
        return self._choices[index]


class _Choice:
    """One choice of an answer.

    Args:
        parser: Parser of its text.
        name: Name that no other choice of any request has.
        short_ids: See `ToolStage`.
    """

    def __init__(self, parser: CallParser, name: str, short_ids: bool) -> None:
        self._parser = parser
        self._name = name
        self._short_ids = short_ids
        self._has_begun = False
        self._thoughts: list[str] = []  # thinking that has come in the middle of a call

    def deltas(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of the chunks that one choice of a chunk gives."""
        delta, finish_reason = choice.get("delta") or {}, choice.get("finish_reason")
        self._thoughts += [delta["reasoning_content"]] if delta.get("reasoning_content") else []
        before = [] if self._parser.is_within_call else self._taken_thoughts()
        pieces = self._parser.feed(delta.get("content") or "")
        if finish_reason is not None:
            pieces += self._parser.end(finish_reason)
        made = [*self._written(delta, [*before, *pieces])]
        if finish_reason is not None or not self._parser.is_within_call:
            made += self._written({}, self._taken_thoughts())
        if not made and (choice.get("logprobs") or finish_reason is not None or not self._has_begun):
            made = [{}]
        if made and not self._has_begun:
            self._has_begun = True
            made[0] = {"role": "assistant", **made[0]}
        bare = {**choice, "finish_reason": None, "logprobs": None}
        choices = [{**bare, "delta": each} for each in made]
        if choices:
            choices[0]["logprobs"] = choice.get("logprobs")
            choices[-1]["finish_reason"] = self._finish_reason(finish_reason)
        return choices

    def _taken_thoughts(self) -> list[Piece]:
        """The thinking that has come and was not handed on."""
        thoughts, self._thoughts = self._thoughts, []
        return [ThinkingPiece("".join(thoughts))] if thoughts else []

    def _written(self, delta: dict[str, Any], pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        kept = {key: value for key, value in delta.items() if key not in _WRITTEN and value is not None}
        if kept:
            yield kept
        for piece in pieces:
            if not isinstance(piece, CallArguments):
                yield from self._written({}, self._taken_thoughts())
            if isinstance(piece, CallBegin):
                function = {"name": piece.name, "arguments": ""}
                yield {
                    "tool_calls": [
                        {"index": piece.index, "id": self._id(piece.index), "type": "function", "function": function}
                    ]
                }
            elif isinstance(piece, CallArguments):
                yield {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
            else:
                yield {"content" if isinstance(piece, TextPiece) else "reasoning_content": piece.text}

    def _id(self, index: int) -> str:
        """The id of a call: the same whenever the answer is made of the same request."""
        digest = hashlib.sha256(f"{self._name}:{index}".encode()).hexdigest()
        return digest[:9] if self._short_ids else f"call_{digest[:24]}"

    def _finish_reason(self, given: str | None) -> str | None:
        return "tool_calls" if given == "stop" and self._parser.has_complete_calls else given
