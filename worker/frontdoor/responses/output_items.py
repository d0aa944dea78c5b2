"""The output of a response while it is generated: deltas of a chat as items and their events."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from worker.frontdoor.errors import Refused
from worker.frontdoor.responses.items import Item
from worker.frontdoor.responses.outputs import CallOutput, Event, MessageOutput, OutputItem, ReasoningOutput


class OutputItems:
    """Items of one response, of which at most the last one is unfinished.

    Args:
        num_alternatives: Most likely tokens to report beside each log probability.
    """

    def __init__(self, num_alternatives: int) -> None:
        self._num_alternatives = num_alternatives
        self._finished: list[Item] = []
        self._open: OutputItem | None = None
        self._call_index = -1
        self._logprobs: list[Item] = []
        self._before: list[Item] = []  # of the chunk with the newest reasoning or call, in which a message may begin
        self._num_ahead = 0  # bytes of a message's tokens behind its text: a character or a mark may go on
        self._unscored = b""  # newest text of a message, whose tokens come with what is behind it in the same chunk

    @property
    def items(self) -> list[Item]:
        """The items as far as they have been generated."""
        return [*self._finished, *([] if self._open is None else [self._open.item("in_progress")])]

    def events(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a chunk's choice.

        Raises:
            Refused: 502, it has a part of a call that has ended.
        """
        delta = choice.get("delta") or {}
        reasoning, text, calls = (delta.get(key) for key in ("reasoning_content", "content", "tool_calls"))
        self._logprobs += _logprobs_of(choice, self._num_alternatives)
        if reasoning:
            yield from self._of_reasoning(reasoning)
            self._set_aside()
        if text:
            yield from self._of_text(text)
        for call in calls or ():
            yield from self._of_call(call)
        if calls:
            self._set_aside()

    def end(self, status: str) -> Iterator[Event]:
        """The events of the end; a completed response has a message or a call, be it empty.

        Args:
            status: Status of the last item.
        """
        if status == "completed" and all(item["type"] == "reasoning" for item in self.items):
            yield from self._opened(MessageOutput(len(self.items)))
        if isinstance(self._open, MessageOutput) and self._logprobs:  # of tokens without a text
            logprobs, self._logprobs = self._logprobs, []
            yield from self._open.add("", logprobs)
        yield from self._closed(status)

    def _set_aside(self) -> None:
        """Have no message get log probabilities of reasoning and of calls, but for the text that
        may follow in the same chunk.
        """
        if self._logprobs:
            self._before, self._logprobs = self._logprobs, []

    def _of_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, ReasoningOutput):
            yield from self._opened(ReasoningOutput(len(self.items)))
        assert isinstance(self._open, ReasoningOutput)
        yield from self._open.add(text)

    def _of_text(self, text: str) -> Iterator[Event]:
        if isinstance(self._open, ReasoningOutput | CallOutput):
            self._logprobs = _from_text_on(self._before + self._logprobs, text)
            self._before = []
        if not isinstance(self._open, MessageOutput):
            yield from self._opened(MessageOutput(len(self.items)))
            self._num_ahead = 0
        assert isinstance(self._open, MessageOutput)
        encoded = text.encode()
        of_new = encoded[self._num_ahead :]
        self._num_ahead = max(0, self._num_ahead - len(encoded))
        logprobs = self._taken(of_new) if of_new else []
        self._unscored = b"" if logprobs else of_new
        yield from self._open.add(text, logprobs)

    def _taken(self, text: bytes) -> list[Item]:
        """The log probabilities of the tokens up to the end of a text, which are taken."""
        places = _places(self._logprobs, text)
        end = len(self._logprobs) if places is None else places.end
        self._num_ahead = 0 if places is None else places.num_ahead
        taken, self._logprobs = self._logprobs[:end], self._logprobs[end:]
        return taken

    def _of_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        index = call.get("index", 0)
        if index > self._call_index:
            self._call_index = index
            yield from self._opened(CallOutput(len(self.items), call))
        if index < self._call_index or not isinstance(self._open, CallOutput):
            raise Refused(502, "the frontend sent parts of a call after the end of the call", kind="server_error")
        arguments = (call.get("function") or {}).get("arguments")
        if arguments:
            yield from self._open.add(arguments)

    def _opened(self, output: OutputItem) -> Iterator[Event]:
        yield from self._closed("completed")
        self._open = output
        yield from output.begin()

    def _closed(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        if isinstance(self._open, MessageOutput) and self._unscored and self._logprobs:
            places = _places(self._logprobs, self._unscored)
            if places is not None:
                yield from self._open.add("", self._logprobs[places.begin : places.end])
                del self._logprobs[: places.end]
        self._unscored = b""
        closed, self._open = self._open, None
        self._finished.append(closed.item(status))
        yield from closed.end(status)


def _logprobs_of(choice: Mapping[str, Any], num_alternatives: int) -> list[Item]:
    """The log probabilities of a chunk; the frontend reports one alternative where none is asked
    for.
    """
    content = (choice.get("logprobs") or {}).get("content")
    return [
        {**_token(each), "top_logprobs": [_token(top) for top in (each.get("top_logprobs") or ())[:num_alternatives]]}
        for each in content or ()
    ]


class _Places(NamedTuple):
    """Tokens that spell a text.

    Attributes:
        begin: Index of the first.
        end: Index behind the last.
        num_ahead: Bytes of the last behind the text.
    """

    begin: int
    end: int
    num_ahead: int


def _places(logprobs: Sequence[Item], text: bytes, *, last: bool = False) -> _Places | None:
    """The first tokens that spell ``text``, or the last; None if none do, as where tokens are
    hidden among them, or are told by their ids.
    """
    ends = [0, *accumulate(len(each["bytes"]) for each in logprobs)]
    whole = b"".join(bytes(each["bytes"]) for each in logprobs)
    start = whole.rfind(text) if last else whole.find(text)
    if start < 0:
        return None
    end = bisect_left(ends, start + len(text))
    return _Places(bisect_right(ends, start) - 1, end, ends[end] - start - len(text))


def _from_text_on(logprobs: list[Item], text: str) -> list[Item]:
    """The log probabilities from the first token of ``text`` on, behind those of other items."""
    places = _places(logprobs, text.encode(), last=True)
    return _last_tokens(logprobs, text) if places is None else logprobs[places.begin :]


def _last_tokens(logprobs: list[Item], text: str) -> list[Item]:
    """The log probabilities of the last tokens, as many as make ``text``."""
    num_bytes, place = len(text.encode()), len(logprobs)
    while place > 0 and num_bytes > 0:
        place -= 1
        num_bytes -= len(logprobs[place]["bytes"])
    return logprobs[place:]


def _token(each: Mapping[str, Any]) -> Item:
    found = each.get("bytes")
    in_bytes = list(each["token"].encode()) if found is None else found
    return {"token": each["token"], "logprob": each["logprob"], "bytes": in_bytes}
