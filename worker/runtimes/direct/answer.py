"""The chunks of a choice → what is sent of it: text beside token ids, cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from worker.requests.response import STOP_STRING, STOP_TOKEN
from worker.requests.rollout import ROLLOUT, HeldData
from worker.runtimes.direct.request import DirectRequest
from worker.text.answer_text import AnswerText

_PER_TOKEN = ("log_probs", "top_logprobs")
"""Keys of a chunk whose values have one entry per token."""


def cancelled(request: DirectRequest) -> Iterator[dict[str, Any]]:
    """The last chunk of each choice of a request that was cancelled before anything was computed;
    its prompt may not have been checked.
    """
    prompt = request.fields["token_ids"]
    count = len(prompt) if isinstance(prompt, list) else 0
    usage = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
    text = {"text": ""} if request.wants_text else {}
    for index in range(request.num_choices):
        yield {"token_ids": [], "index": index, **text, "finish_reason": "cancelled", "completion_usage": usage}


class ChoiceText:
    """Adds the text to the chunks of one choice, and ends it at a stop string.

    Tokens that may be part of a stop string are held back until that is known, with what is said of
    them: another worker can go on after any chunk (`DirectRequest.num_generated`).

    Args:
        request: The request that is answered.
        tokenizer: Tokenizer of the checkpoint; not used for a request that needs no text.

    Attributes:
        has_stopped: Whether a stop string has ended the answer.
        num_taken: Tokens of the answer so far, up to the one that completes a stop string; those
            that another worker has generated among them. Not counted where no text is needed.
    """

    def __init__(self, request: DirectRequest, tokenizer: Any) -> None:
        self.has_stopped = False
        self._request = request
        self._needed = request.wants_text or bool(request.stops)
        self.num_taken = self._num_sent = self._num_told = request.num_generated
        self._sent_text = 0
        self._held_data = HeldData()
        self._held: dict[str, list[Any]] = {key: [] for key in ("token_ids", *_PER_TOKEN)}
        if self._needed:
            decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=request.skip_special_tokens)
            tokens, begin = request.fields["token_ids"], request.num_prompt_tokens
            self._text = AnswerText(decode, request.stops, include=request.include_stop, context=tokens[:begin])
            self._sent_text = self._text.resume(tokens[begin:], max(0, request.min_tokens - 1))

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """``chunk`` as it is sent; None if there is nothing to send yet. After a stop string the
        choice is over, whatever the engine still has to say.
        """
        if not self._needed:
            return chunk
        for key, values in self._held.items():
            values += chunk.pop(key, ())
        finish_reason = chunk.get("finish_reason")
        self._take(ends=finish_reason is not None, told=chunk.get(STOP_STRING))
        if self.has_stopped and finish_reason in (None, "length"):
            chunk["finish_reason"] = finish_reason = "stop"
        if self.has_stopped:
            chunk["completion_usage"] = self._usage(chunk.get("completion_usage"))
        self._move_shown(chunk, is_last=finish_reason is not None)
        self._move_data(chunk, is_last=finish_reason is not None)
        is_empty = not chunk["token_ids"] and not chunk.get("text") and finish_reason is None
        return None if is_empty and "engine_data" not in chunk else chunk

    def _take(self, *, ends: bool, told: str | None) -> None:
        """Take the new tokens; the last completes the stop string that the worker has ``told``,
        even behind fewer than the fewest: others were generated before the request moved here.
        """
        new = self._held["token_ids"][self.num_taken - self._num_sent :]
        for place, token_id in enumerate(new, 1):
            self.num_taken += 1
            completed = told if place == len(new) else None
            self._text.is_too_short = self.num_taken < self._request.min_tokens and completed is None
            if self._text.append(token_id, completed):
                self.has_stopped = True
                return
        if ends:
            self.has_stopped = self._text.finish()

    def _move_shown(self, chunk: dict[str, Any], *, is_last: bool) -> None:
        """Move what is final from what is held back into ``chunk``."""
        answer, whole = self._text, self.num_taken - self._num_sent
        if self.has_stopped:
            count = answer.num_tokens - self._num_sent
        elif is_last or not self._request.stops:
            count = whole
        else:
            count = answer.num_shown_tokens - self._num_sent
        for key, values in self._held.items():
            if values or key == "token_ids":
                chunk[key] = values[:count]
                del values[:count]
        self._num_sent += count
        if self._request.wants_text:
            sent = self._sent_text  # a stop string may have begun in it
            chunk["text"] = answer.text[sent:] if is_last else answer.text_of(self._num_sent, sent)
            self._sent_text += len(chunk["text"])
        if self.has_stopped and answer.stopped_by is not None:
            chunk.pop(STOP_TOKEN, None)
            chunk[STOP_STRING] = answer.stopped_by

    def _move_data(self, chunk: dict[str, Any], *, is_last: bool) -> None:
        """Hold back what ``chunk`` says of tokens that are, and add what is said of those that are
        sent now; at a stop string of all up to the one that completes it.
        """
        data = chunk.get("engine_data", {})
        is_whole = self._held_data.is_empty and not self._held["token_ids"]
        if (ROLLOUT in data or not self._held_data.is_empty) and not is_whole:
            if ROLLOUT in data:
                self._held_data.add(data[ROLLOUT])
            count = None if is_last else self._num_sent - self._num_told
            told = self._held_data.take(self.num_taken - self._num_told if self.has_stopped else count)
            rest = {key: value for key, value in data.items() if key != ROLLOUT}
            chunk["engine_data"] = rest if told is None else {**rest, ROLLOUT: told}
            if not chunk["engine_data"]:
                del chunk["engine_data"]
        self._num_told = self._num_sent

    def _usage(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The usage up to the token that completes the stop string; ``given`` is that of all
        tokens, None where the engine has not said it.
        """
        behind = len(self._held["token_ids"]) - (self.num_taken - self._num_sent)
        prompt = self._request.num_prompt_tokens if given is None else given["prompt_tokens"]
        completion = self.num_taken if given is None else given["completion_tokens"] - behind
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**(given or {}), **counts}
