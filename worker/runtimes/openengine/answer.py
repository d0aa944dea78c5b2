"""The chunks of a request → the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from worker.engines import LEAST_LOGPROB
from worker.requests.continuation import COMPUTED_WITH
from worker.requests.prompt_scores import END_TOKEN, PROMPT_LOGPROBS, PROMPT_TOKENS, TokenText
from worker.requests.receipts import CHANNEL
from worker.requests.response import STOP_STRING, STOP_TOKEN
from worker.requests.rollout import ABORT, ROLLOUT
from worker.requests.token_weights import WEIGHTS
from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.request import Asked

_REASONS = {
    "stop": wire.FINISH_REASON_STOP,
    "length": wire.FINISH_REASON_LENGTH,
    "abort": wire.FINISH_REASON_CANCELLED,  # the message has `ABORT`
    "cancelled": wire.FINISH_REASON_CANCELLED,
}

MOST_TOKENS = 256
"""Tokens of one event at most. The engine puts all that a slow client has not taken into one chunk;
with 100 candidates for each token more would be beyond the 4 MiB that gRPC's clients take.
"""

Chunk = Mapping[str, Any]


class Answer:
    """Makes the events of one request and counts its tokens.

    Args:
        request_id: Id that the events have.
        asked: Request as it was read.
        request: The request as it is served.
        token_text: Texts of tokens, None without a tokenizer.
        end_ids: The model's own end tokens.
    """

    def __init__(
        self,
        request_id: str,
        asked: Asked,
        request: DirectRequest,
        token_text: TokenText | None,
        end_ids: Collection[int],
    ) -> None:
        self._request_id = request_id
        self._asked = asked
        self._request = request
        self._token_text = token_text if request.wants_text else None
        stop_ids = request.fields.get("stop_conditions", {}).get("stop_token_ids") or ()
        self._model_ends = frozenset(end_ids).difference(stop_ids)
        self._prompt_due = asked.prompt_scores_from is not None
        self._unfinished = request.num_choices
        self._usage = wire.Usage()

    def events(self, chunk: Chunk) -> Iterator[wire.GenerateResponse]:
        """The events of a chunk, as `worker.runtimes.direct` makes it."""
        data = chunk.get("engine_data") or {}
        if self._prompt_due and PROMPT_LOGPROBS in data:
            self._prompt_due = False
            yield self._event(prompt=wire.PromptOutput(tokens=self._prompt(data)))
        ends = chunk.get("finish_reason") is not None
        rollout = data.get(ROLLOUT, "")
        if chunk["token_ids"] or chunk.get("text") or (rollout and not ends):
            tokens = list(self._tokens(chunk))
            computed_with = data.get(COMPUTED_WITH)
            while len(tokens) > MOST_TOKENS and not rollout:  # which is told of all of them
                output = wire.TokenOutput(output_index=chunk["index"], tokens=tokens[:MOST_TOKENS])
                yield self._event(token=output, computed_with=computed_with)
                del tokens[:MOST_TOKENS]
            output = wire.TokenOutput(output_index=chunk["index"], tokens=tokens, text=chunk.get("text"))
            yield self._event(token=output, engine_data=rollout, computed_with=computed_with)
            rollout = ""
        if ends:
            yield self._finished(chunk, data, rollout)

    def _event(self, **event: Any) -> wire.GenerateResponse:
        return wire.GenerateResponse(request_id=self._request_id, **event)

    def _finished(self, chunk: Chunk, data: Mapping[str, Any], rollout: str) -> wire.GenerateResponse:
        if "completion_usage" in chunk:  # one that is only checked has none
            self._count(chunk["completion_usage"])
        self._unfinished -= 1
        told = {key: data[key] for key in (CHANNEL, END_TOKEN, WEIGHTS, ABORT) if key in data}
        finished = wire.GenerationFinished(
            output_index=chunk["index"],
            reason=_REASONS[chunk["finish_reason"]],
            message=json.dumps(told, separators=(",", ":")) if told else "",
            stop_match=self._stop_match(chunk),
        )
        usage = None if self._unfinished else self._usage
        return self._event(finished=finished, usage=usage, engine_data=rollout)

    def _stop_match(self, chunk: Chunk) -> wire.StopMatch | None:
        if STOP_STRING in chunk:
            return wire.StopMatch(stop_text=chunk[STOP_STRING])
        token_id = chunk.get(STOP_TOKEN)
        if token_id is None:
            return None
        name = "eos_token_id" if token_id in self._model_ends else "stop_token_id"
        return wire.StopMatch(**{name: token_id})

    def _count(self, usage: Mapping[str, Any]) -> None:
        """Add the tokens of a choice. The prompt is that of all; a later choice may find the KV of
        it that an earlier one computed, so that the fewest cached tokens are the request's.
        """
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens")
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
        total = self._usage
        total.prompt_tokens = usage["prompt_tokens"]
        total.completion_tokens += usage["completion_tokens"]
        total.total_tokens = total.prompt_tokens + total.completion_tokens
        if cached is not None and (not total.HasField("cached_prompt_tokens") or cached < total.cached_prompt_tokens):
            total.cached_prompt_tokens = cached
        if reasoning is not None:
            total.reasoning_tokens += reasoning

    def _tokens(self, chunk: Chunk) -> Iterator[wire.TokenInfo]:
        scores, tops = chunk.get("log_probs"), chunk.get("top_logprobs")
        for position, token_id in enumerate(chunk["token_ids"]):
            info = wire.TokenInfo(token_id=token_id, token=self._text(token_id))
            if scores is not None:
                info.logprob = scores[position]
            for one in () if tops is None else tops[position]:
                if one["token_id"] == token_id:
                    info.rank = one["rank"]
                info.candidates.add(token=self._text(one["token_id"]), **one)
            yield info

    def _prompt(self, data: Mapping[str, Any]) -> Iterator[wire.TokenInfo]:
        first, most = self._asked.prompt_scores_from, self._asked.num_prompt_candidates
        assert first is not None
        for position, (token, scores) in enumerate(zip(data[PROMPT_TOKENS], data[PROMPT_LOGPROBS], strict=True)):
            info = wire.TokenInfo(token_id=token["token_id"], token=self._text(token["token_id"]))
            if scores is not None and position >= first:
                for key, one in sorted(scores.items(), key=lambda item: item[1]["rank"]):
                    token_id, logprob, rank = int(key), _exact(one["logprob"]), one["rank"]
                    if token_id == info.token_id:
                        info.logprob, info.rank = logprob, rank
                    if rank <= most:
                        info.candidates.add(token_id=token_id, logprob=logprob, token=self._text(token_id), rank=rank)
            yield info

    def _text(self, token_id: int) -> str:
        """A token's text; a part of a character is the replacement character."""
        return "" if self._token_text is None else self._token_text(token_id).decode(errors="replace")


def _exact(logprob: float) -> float:
    """A log probability of the prompt, which is JSON data there: it has no minus infinity."""
    return float("-inf") if logprob == LEAST_LOGPROB else logprob
