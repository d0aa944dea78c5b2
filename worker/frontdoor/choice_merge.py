"""Chunks and answers of single choices, merged into those of one answer in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from worker.frontdoor.encoding import encoded
from worker.frontdoor.usage import usage_of_choices

_DONE = b"data: [DONE]"


class ChoiceMerge:
    """Merges the answers to the requests for each choice, in a stream or whole.

    Args:
        num_choices: Number of requests.

    Attributes:
        usage_chunk: The last chunk of a stream, behind those of all choices, if there is one.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._usages: dict[int, Mapping[str, Any]] = {}
        self.usage_chunk: dict[str, Any] | None = None
        self._same: dict[str, Any] = {}  # id and time, those of the chunk that came first
        self._done: set[int] = set()

    def events(self, index: int, events: Sequence[bytes]) -> bytes:
        """Events of one choice's stream as those of all; some wait for the `end`."""
        merged = b""
        for event in events:
            lines = [self._line(index, line) for line in event.split(b"\n")]
            kept = b"\n".join(line for line in lines if line is not None)
            merged += kept and kept + b"\n\n"
        return merged

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """A chunk of one choice as one of all, None if it waits for the end of all: `usage_chunk`.

        Raises:
            KeyError, TypeError, AttributeError: it is not in OpenAI's form.
        """
        self._adapt(index, chunk)
        if chunk.get("choices") == [] and chunk.get("usage"):
            self.usage_chunk = chunk
            return None
        return chunk

    def end(self) -> bytes:
        """The last events of a stream, once all choices have ended."""
        usage = b"" if self.usage_chunk is None else b"data: " + encoded(self.usage_chunk) + b"\n\n"
        return usage + (_DONE + b"\n\n" if len(self._done) == self._num_choices else b"")

    def whole(self, answers: Sequence[bytes]) -> bytes:
        """The answer made of all choices' answers that are not streamed.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: one is not in OpenAI's form.
        """
        bodies = [json.loads(answer) for answer in answers]
        for index, body in enumerate(bodies):
            self._adapt(index, body)
        choices = sorted((one for body in bodies for one in body["choices"]), key=lambda one: int(one["index"]))
        merged = {**bodies[0], "choices": choices}
        if bodies[-1].get("usage"):
            merged["usage"] = bodies[-1]["usage"]
        extensions = [body.get("nvext") for body in bodies]
        if any(extensions):
            merged["nvext"] = {"choices": extensions}
        return encoded(merged)

    def _line(self, index: int, line: bytes) -> bytes | None:
        """A line of an event for the client, None if it waits for the end of all choices."""
        if line == _DONE:
            self._done.add(index)
            return None
        if not line.startswith(b"data: {"):
            return line
        try:
            chunk = json.loads(line[6:])
        except ValueError:
            return line
        merged = self.chunk(index, chunk)
        return None if merged is None else b"data: " + encoded(merged)

    def _adapt(self, index: int, chunk: dict[str, Any]) -> None:
        """Make a chunk, or an answer, of one choice that of all."""
        for name in ("id", "created"):
            if name in chunk:
                chunk[name] = self._same.setdefault(name, chunk[name])
        for choice in chunk.get("choices") or ():
            choice["index"] = choice.get("index", 0) * self._num_choices + index
        if chunk.get("usage"):
            self._usages[index] = chunk["usage"]
            chunk["usage"] = usage_of_choices([self._usages[index] for index in sorted(self._usages)])
