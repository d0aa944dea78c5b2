"""Chunks of a chat's answer as the events of a message's stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from worker.engines.weights import ABORTED
from worker.frontdoor.errors import Refused
from worker.frontdoor.messages.held_text import HeldText
from worker.frontdoor.messages.request import TranslatedRequest
from worker.frontdoor.messages.thinking import signature_of
from worker.frontdoor.nvext import taken_entries
from worker.frontdoor.returned_tokens import joined_nvext
from worker.frontdoor.values import Object
from worker.requests.rollout import ABORT, MATCHED, ROLLOUT

Event = Object
"""An event's data, with the ``type`` that is its name, too."""

_DELTAS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTA_TYPES = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageEvents:
    """Makes the events of one answer. Blocks come one after the other, each closed before the next.

    Args:
        request: The request that is answered.
    """

    def __init__(self, request: TranslatedRequest) -> None:
        self._request = request
        self._held = HeldText(request.stop_sequences)
        self._num_blocks = 0
        self._open: str | None = None  # type of the open block
        self._unsent: Object | None = None  # the open block, before anything of it is sent
        self._open_call: int | None = None  # index of the open block's call in the chat
        self._thoughts: list[str] = []  # parts of the open block's
        self._has_calls = False
        self._has_begun = False
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._ends_at_token = False  # rather than at a stop sequence
        self._usage: Mapping[str, Any] = {}
        self._extension: Object = {}

    def take(self, chunk: dict[str, Any]) -> list[Event]:
        """The events of the next chunk, which then is without data that no client asked for.

        Raises:
            Refused: 502, the chunk is not in OpenAI's form; 400, the answer was aborted.
        """
        if self._request.asks_for_match:
            _, matched, is_aborted = taken_entries(chunk, ROLLOUT, MATCHED, ABORT)
            self._ends_at_token |= isinstance(matched, int)
            if is_aborted:
                raise Refused(400, ABORTED)
        self._usage = chunk.get("usage") or self._usage
        if chunk.get("nvext"):
            self._extension = joined_nvext(self._extension, chunk["nvext"])
        events = [] if self._has_begun else self._start(chunk)
        for choice in chunk.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = choice.get("delta") or {}
            if delta.get("reasoning_content"):
                events += self._grow("thinking", delta["reasoning_content"])
            if delta.get("content"):
                events += self._grow("text", delta["content"])
            for call in delta.get("tool_calls") or ():
                events += self._call(call)
        return events

    def end(self, deadline: float | None = None) -> list[Event]:
        """The last events, once all chunks have come.

        Args:
            deadline: Time at which the answer had to end, seconds since 1970; None without one.
        """
        events = self._close(is_last=True)
        delta = {"stop_reason": self._stop_reason(deadline), "stop_sequence": self._stop_sequence}
        last: Event = {"type": "message_delta", "delta": delta, "usage": usage_of(self._usage)}
        if self._extension:
            last["nvext"] = self._extension
        return [*events, last, {"type": "message_stop"}]

    def _start(self, chunk: Mapping[str, Any]) -> list[Event]:
        self._has_begun = True
        message: Object = {
            "id": message_id(str(chunk.get("id", ""))),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self._usage) | {"output_tokens": 0},
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _grow(self, kind: str, text: str) -> list[Event]:
        """More of a text or a thought."""
        events = []
        if self._open != kind:
            events = self._close()
            self._open = kind
            self._unsent = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return events + self._delta(self._held.add(text))

    def _call(self, call: Mapping[str, Any]) -> list[Event]:
        """More of a call, or the beginning of one."""
        function = call.get("function") or {}
        events: list[Event] = []
        if self._open_call is None or self._open_call != call.get("index"):
            id, name = call.get("id"), function.get("name")
            if not id or not name:
                raise Refused(502, "the frontend's answer has a call without id or name", kind="server_error")
            events = [*self._close(), self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})]
            self._open, self._open_call, self._has_calls = "tool_use", call.get("index"), True
        return events + self._delta(self._held.add(function.get("arguments") or ""))

    def _begin(self, block: Object) -> Event:
        self._unsent = None
        self._num_blocks += 1
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, text: str) -> list[Event]:
        """More of the open block, with its beginning if nothing of it has been sent."""
        kind = self._open
        if not text or kind is None:
            return []
        events = [] if self._unsent is None else [self._begin(self._unsent)]
        if kind == "thinking":
            self._thoughts.append(text)
            if not self._request.shows_thoughts:
                return events
        return [*events, self._delta_event({"type": _DELTA_TYPES[kind], _DELTAS[kind]: text})]

    def _delta_event(self, delta: Object) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self, *, is_last: bool = False) -> list[Event]:
        """End the open block, if there is one; an empty one is left out."""
        is_stop = self._finish_reason == "stop" or (self._finish_reason == "tool_calls" and self._open != "tool_use")
        if is_last and is_stop and not self._ends_at_token:
            rest, self._stop_sequence = self._held.stop()
        else:
            rest = self._held.release()
        events = self._delta(rest)
        kind, is_sent = self._open, self._unsent is None
        self._open = self._open_call = self._unsent = None
        if kind is None or not is_sent:
            return events
        if kind == "thinking":
            signature = signature_of("".join(self._thoughts), is_shown=self._request.shows_thoughts)
            events.append(self._delta_event({"type": "signature_delta", "signature": signature}))
            self._thoughts = []
        return [*events, {"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _stop_reason(self, deadline: float | None) -> str:
        if self._stop_sequence is not None:
            return "stop_sequence"
        if self._finish_reason == "length":
            is_whole = self._usage.get("completion_tokens", 0) >= self._request.max_tokens
            is_late = deadline is not None and time.time() >= deadline
            return "max_tokens" if is_whole or is_late or not self._usage else "model_context_window_exceeded"
        if self._finish_reason == "content_filter":
            return "refusal"
        return "tool_use" if self._has_calls else "end_turn"


def usage_of(usage: Mapping[str, Any]) -> Object:
    """A chat's usage in Anthropic's form, in which input tokens are those that were not cached.

    Args:
        usage: OpenAI's ``usage``; empty before it is known.
    """
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    made = {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return made if thought is None else {**made, "output_tokens_details": {"thinking_tokens": thought}}


def message_id(chat_id: str) -> str:
    """The id of a message for that of a chat's answer."""
    return "msg_" + chat_id.removeprefix("chatcmpl-").replace("-", "")
