"""Chunks of a chat's streamed answer as the events of a Responses stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from worker.frontdoor.errors import Refused
from worker.frontdoor.responses.output_items import OutputItems
from worker.frontdoor.responses.outputs import Event
from worker.frontdoor.responses.response import Response, error_of, usage_of
from worker.frontdoor.returned_tokens import joined_nvext

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reason for which a chat's answer ends → that for which a response is incomplete."""


class Answer:
    """One response while it is generated.

    Args:
        response: The response before its answer has begun.

    Attributes:
        is_over: Whether the last event has been made.
        problem: Refusal or failure that ended it, if one did.
    """

    def __init__(self, response: Response) -> None:
        self._response = response
        self._output = OutputItems(response["top_logprobs"])
        self._finish_reason: str | None = None
        self._sequence_number = 0
        self._reasoning_tokens = 0
        self.is_over = False
        self.problem: Refused | None = None

    @property
    def response(self) -> Response:
        """The response as far as it has been generated."""
        return {**self._response, "output": self._output.items}

    def created(self) -> Iterator[Event]:
        """The first event, and for a background response that it is queued."""
        yield self._of_response("created")
        if self._response["status"] == "queued":
            yield self._of_response("queued")

    def begun(self) -> Iterator[Event]:
        """The event that the answer begins."""
        self._response["status"] = "in_progress"
        yield self._of_response("in_progress")

    def events(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """The events of one chunk. Raises `Refused` if it does not follow those before."""
        self._response["model"] = chunk.get("model") or self._response["model"]
        choices = chunk.get("choices") or ()
        if chunk.get("usage"):
            self._count(chunk["usage"], choices)
        if chunk.get("nvext"):
            self._response["nvext"] = joined_nvext(self._response.get("nvext"), chunk["nvext"])
        for choice in choices:
            yield from self._numbered(self._output.events(choice))
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
        if reason is not None:
            self._response["incomplete_details"] = {"reason": reason}
        status = "completed" if reason is None else "incomplete"
        yield from self._numbered(self._output.end(status))
        self._end(status)
        yield self._of_response(status)

    def failed(self, refused: Refused) -> Iterator[Event]:
        """The last events of an answer that cannot be finished."""
        yield from self._numbered(self._output.end("incomplete"))
        self.problem = refused
        self._response["error"] = error_of(refused)
        self._end("failed")
        yield self._of_response("failed")

    def cancelled(self) -> Iterator[Event]:
        """The last events of a background response that a client has cancelled.

        OpenAI's API has no event for it: the last one is an error that says so.
        """
        yield from self._numbered(self._output.end("incomplete"))
        self._end("cancelled")
        last = {"type": "error", "code": "response_cancelled", "message": "the response was cancelled", "param": None}
        yield from self._numbered([last])

    def is_not_stored(self, last: Iterable[Event]) -> None:
        """Say in the response, and in ``last``, its last events, that there is no room for it."""
        self._response["store"] = False
        for event in last:
            if "response" in event:
                event["response"]["store"] = False

    def _end(self, status: str) -> None:
        self._response["status"] = status
        self._response["completed_at"] = int(time.time()) if status == "completed" else None
        self.is_over = True

    def _of_response(self, kind: str) -> Event:
        (event,) = self._numbered([{"type": f"response.{kind}", "response": self.response}])
        return event

    def _numbered(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            event["sequence_number"] = self._sequence_number
            self._sequence_number += 1
            yield event
