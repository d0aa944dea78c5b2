"""Chunks of a chat's streamed answer as the events of a Responses stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worker.frontdoor.errors import Refused
from worker.frontdoor.responses.items import Item
from worker.frontdoor.responses.outputs import CallOutput, Event, MessageOutput, OutputItem, ReasoningOutput
from worker.frontdoor.responses.response import Response, error_of, usage_of

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reason for which a chat's answer ends → that for which a response is incomplete."""


class Answer:
    """One response while it is generated.

    Args:
        response: The response before its answer has begun.

    Attributes:
        is_over: Whether the last event has been made.
        problem: Why it failed, if it did.
    """

    def __init__(self, response: Response) -> None:
        self._response = response
        self._output: list[Item] = []
        self._open: OutputItem | None = None
        self._call_index = -1
        self._finish_reason: str | None = None
        self._logprobs: list[Item] = []
        self._sequence_number = 0
        self._reasoning_tokens = 0
        self.is_over = False
        self.problem: Refused | None = None

    @property
    def response(self) -> Response:
        """The response as far as it has been generated."""
        unfinished = [] if self._open is None else [self._open.item("in_progress")]
        return {**self._response, "output": [*self._output, *unfinished]}

    def created(self) -> Iterator[Event]:
        """The first event, and for a background response that it is queued."""
        yield self._of_response("response.created")
        if self._response["status"] == "queued":
            yield self._of_response("response.queued")

    def begun(self) -> Iterator[Event]:
        """The event that the answer begins."""
        self._response["status"] = "in_progress"
        yield self._of_response("response.in_progress")

    def events(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """The events of one chunk."""
        self._response["model"] = chunk.get("model") or self._response["model"]
        if chunk.get("usage"):
            self._count(chunk["usage"], chunk.get("choices") or ())
        if chunk.get("nvext"):
            self._response["nvext"] = merged(self._response.get("nvext") or {}, chunk["nvext"])
        for choice in chunk.get("choices") or ():
            yield from map(self._numbered, self._of_choice(choice))
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _count(self, usage: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> None:
        """Take the usage so far; the tokens up to the last chunk with reasoning are those of the
        reasoning.
        """
        if any((choice.get("delta") or {}).get("reasoning_content") for choice in choices):
            self._reasoning_tokens = usage["completion_tokens"]
        self._response["usage"] = usage_of(usage, self._reasoning_tokens)

    def completed(self) -> Iterator[Event]:
        """The last events, after all chunks: the response is completed, or incomplete."""
        reason = _INCOMPLETE.get(self._finish_reason or "")
        if self._open is None and not self._has_answer() and reason is None:
            yield from map(self._numbered, self._message_begins())
        status = "completed" if reason is None else "incomplete"
        yield from map(self._numbered, self._closed(status))
        if reason is not None:
            self._response["incomplete_details"] = {"reason": reason}
        yield self._over(status)

    def failed(self, refused: Refused) -> Iterator[Event]:
        """The last events of an answer that cannot be finished."""
        yield from map(self._numbered, self._closed("incomplete"))
        self.problem = refused
        self._response["error"] = error_of(refused)
        yield self._over("failed")

    def cancelled(self) -> Iterator[Event]:
        """The last events of a background response that a client has cancelled.

        OpenAI's API has no event for it: the last one is an error that says so.
        """
        yield from map(self._numbered, self._closed("incomplete"))
        self._ended("cancelled")
        yield self._numbered(
            {"type": "error", "code": "response_cancelled", "message": "the response was cancelled", "param": None}
        )

    # Events of items.

    def _of_choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta") or {}
        reasoning, text, calls = (delta.get(key) for key in ("reasoning_content", "content", "tool_calls"))
        self._logprobs += _logprobs_of(choice, self._response["top_logprobs"])
        if reasoning:
            yield from self._of_reasoning(reasoning)
            self._logprobs = _last_tokens(self._logprobs, text or "")
        if text:
            yield from self._of_text(text)
        for call in calls or ():
            yield from self._of_call(call)
        if calls:
            self._logprobs = []  # a response has none of their tokens

    def _of_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, ReasoningOutput):
            yield from self._opened(ReasoningOutput(len(self._output) + (self._open is not None)))
        assert isinstance(self._open, ReasoningOutput)
        yield from self._open.add(text)

    def _of_text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, MessageOutput):
            yield from self._message_begins()
        assert isinstance(self._open, MessageOutput)
        logprobs, self._logprobs = self._logprobs, []
        yield from self._open.add(text, logprobs)

    def _message_begins(self) -> Iterator[Event]:
        yield from self._opened(MessageOutput(len(self._output) + (self._open is not None)))

    def _of_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        index = call.get("index", 0)
        if index > self._call_index:
            self._call_index = index
            yield from self._opened(CallOutput(len(self._output) + (self._open is not None), call))
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
        if isinstance(self._open, MessageOutput):
            self._open.add_logprobs(self._logprobs)
            self._logprobs = []
        closed, self._open = self._open, None
        self._output.append(closed.item(status))
        yield from closed.end(status)

    def _has_answer(self) -> bool:
        return any(item["type"] != "reasoning" for item in self._output)

    # Events of the response.

    def _ended(self, status: str) -> None:
        self._response["status"] = status
        self._response["completed_at"] = int(time.time()) if status == "completed" else None
        self.is_over = True

    def _over(self, status: str) -> Event:
        self._ended(status)
        return self._of_response(f"response.{status}")

    def _of_response(self, kind: str) -> Event:
        return self._numbered({"type": kind, "response": self.response})

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        return event


def _logprobs_of(choice: Mapping[str, Any], num_alternatives: int) -> list[Item]:
    """The log probabilities of a chunk; the frontend reports one alternative where none is asked
    for.
    """
    content = (choice.get("logprobs") or {}).get("content")
    return [
        {**_token(each), "top_logprobs": [_token(top) for top in (each.get("top_logprobs") or ())[:num_alternatives]]}
        for each in content or ()
    ]


def _last_tokens(logprobs: list[Item], text: str) -> list[Item]:
    """The log probabilities of the last tokens, as many as make ``text``."""
    num_characters = 0
    place = len(logprobs)
    while place > 0 and num_characters < len(text):
        place -= 1
        num_characters += len(logprobs[place]["token"])
    return logprobs[place:]


def _token(each: Mapping[str, Any]) -> Item:
    found = each.get("bytes")
    in_bytes = list(each["token"].encode()) if found is None else found
    return {"token": each["token"], "logprob": each["logprob"], "bytes": in_bytes}


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Two objects of which the later one's values win, and objects in both are merged."""
    found = dict(earlier)
    for key, value in later.items():
        before = found.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return found
