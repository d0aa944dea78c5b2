"""`TokenDelta` of an engine → the chunk that Dynamo's frontend takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.vocabulary import ReasoningTokens
from worker.engines import TokenDelta, TokenLogprob
from worker.engines.prediction import FollowedPrediction
from worker.engines.weights import ABORTED
from worker.errors import RequestAborted, RequestFailed
from worker.requests.continuation import COMPUTED_WITH
from worker.requests.prompt_scores import TokenText, end_json, scores_json
from worker.requests.receipts import CHANNEL, RequestReceipt
from worker.requests.request import GenerationRequest
from worker.requests.rollout import ABORT, CUT_OFF, RolloutData
from worker.requests.token_weights import WEIGHTS, TokenWeights

STOP_STRING = "stop_string"
"""Key of the stop string that ended an answer, in its last chunk."""

STOP_TOKEN = "stop_token_id"
"""Key of the token that ended an answer, in its last chunk."""


class ResponseBuilder:
    """Builds the chunks of one request and counts its tokens.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens of the answer so far.
        num_replayed_tokens: Tokens of it that were sent before the request was migrated.
        num_cached_tokens: Prompt tokens whose KV the engine found in its cache.
        num_preemptions: Preemptions of the request, None where the engine reports none.
        weights: Versions of the weights that its tokens are sampled from.
    """

    def __init__(
        self,
        request: GenerationRequest,
        hidden: frozenset[int],
        receipt: RequestReceipt | None = None,
        token_text: TokenText | None = None,
        weights: TokenWeights | None = None,
        reasoning: ReasoningTokens | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        """``hidden`` are the stop tokens that end the answer without being part of it; ``receipt``
        is the request's, None if it wants none; ``token_text`` are the texts of tokens, for
        log probabilities of the prompt; ``weights`` take the versions of its tokens; ``reasoning``
        counts the thinking, None if the model has no tags for it; ``prediction`` are the tokens of
        the text that the request says its answer will mostly be.
        """
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_generated_tokens = self.num_replayed_tokens = len(request.generated_token_ids)
        self.num_cached_tokens = 0
        self.num_preemptions: int | None = None
        self._receipt = receipt
        self._logprobs = None if request.hides_logprobs else request.params.logprobs
        self._rollout = RolloutData(request)
        self._hidden = hidden
        self._prompt = request.prompt_token_ids
        self._token_text = token_text
        self._reasoning = reasoning
        if reasoning is not None:
            reasoning.feed(request.generated_token_ids)
        self._prediction = FollowedPrediction(prediction) if prediction else None
        self._answer = list(request.generated_token_ids) if prediction else []
        self._scores: dict[str, Any] = {}
        self._adapter = request.beside_model
        self._tells_digests = COMPUTED_WITH in request.annotations
        self._controls = str(request.controls)
        self.weights = weights or TokenWeights()

    def chunk(self, delta: TokenDelta) -> dict[str, Any]:
        """The chunk for ``delta``. The caller drops one without tokens, finish or engine data.

        Raises:
            RequestFailed: the engine says that the request failed.
            RequestAborted: it was aborted, and its client does not get the ids that it could go on
                from.
        """
        if delta.finish_reason == "error":
            raise RequestFailed(delta.error or "the engine gave no reason")
        if delta.finish_reason == "abort" and not self._rollout.is_wanted:
            raise RequestAborted(ABORTED)
        shown = len(delta.token_ids) - self._ends_hidden(delta)
        self.num_generated_tokens += shown
        if delta.num_prompt_tokens is not None:
            self.num_prompt_tokens = delta.num_prompt_tokens
        # after a migration a prefix hit may go on into the answer
        self.num_cached_tokens = min(max(self.num_cached_tokens, delta.num_cached_tokens), self.num_prompt_tokens)
        if delta.num_preemptions is not None:
            self.num_preemptions = delta.num_preemptions
        self.weights.take(delta.weights)
        if self._receipt is not None:
            self._receipt.take(delta)
        chunk: dict[str, Any] = {"token_ids": delta.token_ids[:shown], "index": delta.index}
        if self._logprobs is not None and delta.logprobs is not None:
            _add_logprobs(chunk, delta.logprobs[:shown], self._logprobs)
        if self._reasoning is not None:
            self._reasoning.feed(chunk["token_ids"])
        if self._prediction is not None:
            self._answer += chunk["token_ids"]
        data = self._data(delta, shown)
        if delta.weights or (self.weights.entries and delta.finish_reason is not None):
            hidden = len(delta.sampled_ids) - shown if self._rollout.is_wanted else 0  # an end token
            data[WEIGHTS] = self.weights.as_json(self.num_generated_tokens + hidden)
        if self._tells_digests and chunk["token_ids"]:
            digests = {"weights": self.weights.digest, "adapter": self._adapter, "controls": self._controls}
            self._controls = ""  # they stay as they are
            if any(digests.values()):
                data[COMPUTED_WITH] = {name: digest for name, digest in digests.items() if digest}
        if data:
            chunk["engine_data"] = data
        if delta.finish_reason is not None:
            chunk["finish_reason"] = delta.finish_reason
            chunk["completion_usage"] = self.usage()
        return chunk

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of the request so far."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        details = {} if self._reasoning is None else {"reasoning_tokens": self._reasoning.count}
        if self._prediction is not None:
            accepted = self._prediction.follow(self._answer).foreseen
            rejected = max(0, len(self._prediction.tokens) - accepted)
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def _data(self, delta: TokenDelta, shown: int) -> dict[str, Any]:
        """The chunk's data for the client beside tokens, empty if there are none."""
        data: dict[str, Any] = {}
        ends = delta.finish_reason is not None
        if delta.prompt_logprobs is not None:
            data = self._scores = scores_json(self._prompt, delta.prompt_logprobs, self._token_text)
        hidden = (delta.logprobs or [])[shown:]
        end = hidden[0] if hidden else delta.end_logprobs
        if ends and end is not None and self._logprobs is not None:
            data = {**data, **end_json(end, self._token_text)}
        if delta.engine_data is not None:
            data = {**data, **self._engine_data(delta.engine_data, ends=ends)}
        data = {**data, **self._rollout.of(delta)}
        if delta.finish_reason in CUT_OFF and self._rollout.is_wanted:
            data = {**data, ABORT: True}
        if ends and data:  # of an answer that is not streamed the frontend keeps the last chunk's data alone
            data = {**self._scores, **data}
        return data

    def _engine_data(self, data: dict[str, object], *, ends: bool) -> dict[str, object]:
        """The engine's data, with what the worker has to say in the receipt."""
        report = data.get(CHANNEL)
        if self._receipt is None or not isinstance(report, dict):
            return data
        return {**data, CHANNEL: self._receipt.as_json(report, ends=ends)}

    def _ends_hidden(self, delta: TokenDelta) -> bool:
        """Whether the last token is a hidden stop token that shown ones brought into the output."""
        return delta.stop_reason in self._hidden and delta.token_ids[-1:] == [delta.stop_reason]


def _add_logprobs(chunk: dict[str, Any], positions: list[list[TokenLogprob]], top: int) -> None:
    """The sampled token's log probability, and the ``top`` most likely tokens by rank, if any."""
    chunk["log_probs"] = [entries[0].logprob for entries in positions]
    if top > 0:
        chunk["top_logprobs"] = [_ranked(entries, top) for entries in positions]


def _ranked(entries: list[TokenLogprob], top: int) -> list[dict[str, Any]]:
    by_id = {entry.token_id: entry for entry in entries if entry.rank <= top}
    ranked = sorted(by_id.values(), key=lambda entry: (entry.rank, entry.token_id))
    return [{"rank": e.rank, "token_id": e.token_id, "logprob": e.logprob} for e in ranked]
