"""Growing answers, and the results that callers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adapters.chain import Receipt
from worker.engines import FinishReason, TokenLogprob
from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.sampling import LogitsCollector
from worker.sampling import SamplingParams
from worker.text.answer_text import AnswerText

Logprobs = list[list[TokenLogprob]] | list[float]
PromptLogprobs = list[list[TokenLogprob] | None] | list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer.

    Attributes:
        index: Index of the answer; with ``best_of``, 0 is the best.
        text: None without a tokenizer, or with ``detokenize=False``.
        token_ids: Generated ids. Neither a stop token nor a token that holds any part of a stop
            string is among them, unless ``include_stop_str_in_output`` is set.
        logprobs: One list per token of `token_ids`: the token itself first, then the top-n; with
            ``logprobs_simple_format`` the token's own number alone.
        cumulative_logprob: Sum over `token_ids`; None if no log probabilities were requested.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        stop_reason: The stop token or the stop string that ended the answer, if one did.
        generation_logits: float32 ``[len(token_ids), V]``, the model's own, if requested.
        error: Reason of the failure, exactly when `finish_reason` is ``error``.
        receipt: Record of its logits processors' work, if it had any.
        token_times_s: Time of each of `token_ids`, seconds since the request was added.
        num_cached_tokens: Cached tokens: prompt tokens whose KV came from the prefix cache.
    """

    index: int
    text: str | None
    token_ids: list[int]
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    generation_logits: torch.Tensor | None = None
    error: str | None = None
    receipt: Receipt | None = None
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one prompt.

    Attributes:
        request_id: Assigned by the engine.
        prompt: Text of the prompt, None if it came as token ids.
        prompt_token_ids: Token ids of the prompt.
        outputs: The answers, ``n`` of them.
        prompt_logprobs: One entry per prompt token; None for the first, which has no context. With
            ``prompt_logprobs_simple_format`` one number each. Shorter if the first answer was
            cancelled, or failed, before the prompt had been computed.
        context_logits: float32 ``[len(prompt_token_ids), V]``, the model's own, if requested;
            shorter likewise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: PromptLogprobs | None = None
    context_logits: torch.Tensor | None = None

    @property
    def text(self) -> str | None:
        """Text of the only answer; as the next three, raises `ValueError` if there are several."""
        return self._only.text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the only answer."""
        return self._only.token_ids

    @property
    def logprobs(self) -> Logprobs | None:
        """Log probabilities of the only answer."""
        return self._only.logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the only answer."""
        return self._only.finish_reason

    @property
    def _only(self) -> Completion:
        if len(self.outputs) != 1:
            raise ValueError(f"there are {len(self.outputs)} answers; take one of outputs")
        return self.outputs[0]


class Answer:
    """One growing answer: a `Request` of the engine, and its output so far.

    Args:
        request: Admitted, not queued yet.
        text: None without a tokenizer.
        collector: Collects logits and prompt log probabilities, if requested.

    Attributes:
        token_ids: Shown tokens; those of a stop string are removed when it is found.
        token_times_s: Times of the tokens, seconds after the prompt was added.
        token_logprobs: Log probabilities of each token, if requested.
        finish_reason: None while unfinished.
    """

    def __init__(self, request: Request, text: AnswerText | None, collector: LogitsCollector | None) -> None:
        self.request = request
        self.text = text
        self.collector = collector
        self.token_ids: list[int] = []
        self.token_times_s: list[float] = []
        self.token_logprobs: list[list[TokenLogprob]] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self._num_taken = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens; None if no log probabilities were requested."""
        return None if self.request.params.logprobs is None else sum(one[0].logprob for one in self.token_logprobs)

    @property
    def num_shown(self) -> int:
        """Number of tokens that are final."""
        return len(self.token_ids) if self.text is None else min(self.text.num_shown_tokens, len(self.token_ids))

    def take(self, output: Output, time_s: float) -> None:
        """Add a step's output; the answer has ended when `finish_reason` is set."""
        ended = False
        if not self.token_ids:
            self.num_cached_tokens = output.num_cached_tokens
        self._num_taken += 1
        if self.text is not None:
            self.text.is_too_short = output.is_too_short
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
            self.token_times_s.append(time_s)
            if output.logprobs is not None:
                self.token_logprobs.append(output.logprobs)
            ended = self.text is not None and self.text.append(output.token_id)
        if ended:
            self._stop_at_text()
        elif output.finish_reason is not None:
            self.end(output.finish_reason, output.stop_reason, output.error)

    def end(self, reason: FinishReason, stop_reason: int | None = None, error: str | None = None) -> None:
        """No more tokens come."""
        if self.text is not None and self.text.finish() and reason == "length":
            self._stop_at_text()
            return
        self._cut()
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def _stop_at_text(self) -> None:
        assert self.text is not None
        self._cut()
        self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        chain, end = self.request.chain, self.request.prompt_length + self._num_taken
        if chain is not None and chain.position > end:  # the step gave more tokens, which are not part of the answer
            chain.rewind(end)

    def _cut(self) -> None:
        count = len(self.token_ids) if self.text is None else self.text.num_tokens
        for one in (self.token_ids, self.token_times_s, self.token_logprobs):
            del one[count:]

    def completion(self, index: int, wanted: SamplingParams) -> Completion:
        """The completion with the fields that the caller requested."""
        assert self.finish_reason is not None
        chain = self.request.chain
        logprobs: Logprobs | None = None
        if wanted.logprobs is not None:
            logprobs = _simple(self.token_logprobs) if wanted.logprobs_simple_format else self.token_logprobs
        return Completion(
            index=index,
            text=self.text.text if self.text is not None and wanted.detokenize else None,
            token_ids=self.token_ids,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            generation_logits=None if self.collector is None else self.collector.generated_logits(len(self.token_ids)),
            error=self.error,
            receipt=None if chain is None else chain.receipt,
            token_times_s=self.token_times_s,
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(eq=False)
class RequestGroup:
    """One prompt and its answers.

    Attributes:
        id: Assigned by the engine.
        prompt: Text, None if it came as token ids.
        prompt_token_ids: Token ids of the prompt.
        wanted: The caller's parameters.
        answers: ``best_of`` of them.
        started_s: Time when it was added.
    """

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    wanted: SamplingParams
    answers: list[Answer]
    started_s: float = 0.0

    def forgo_speculation(self) -> None:
        """Draft no tokens for its answers."""
        for answer in self.answers:
            answer.request.speculates = False

    def predict(self, tokens: Sequence[int]) -> None:
        """Draft tokens of its answers from what they are likely to be."""
        for answer in self.answers:
            answer.request.prediction = tokens

    def compute_with(self, adapter: LoadedAdapter) -> None:
        """Compute its answers, and their companions of the same model, with a LoRA adapter."""
        for sequence in (one for answer in self.answers for one in answer.request.sequences):
            if not sequence.by_draft_model:
                sequence.adapter = adapter

    @property
    def is_done(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def best(self) -> list[Answer]:
        """The ``n`` answers to return, of ``best_of`` the most likely first, failed ones last."""
        if len(self.answers) <= self.wanted.n:
            return self.answers
        return sorted(self.answers, key=_rank)[: self.wanted.n]

    def result(self) -> Result:
        """The result, once `is_done`."""
        collector = self.answers[0].collector
        scores: PromptLogprobs | None = None if collector is None else collector.prompt_logprobs
        if scores is not None and self.wanted.prompt_logprobs_simple_format:
            scores = [one[0].logprob if isinstance(one, list) else None for one in scores]
        return Result(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[answer.completion(index, self.wanted) for index, answer in enumerate(self.best)],
            prompt_logprobs=scores,
            context_logits=None if collector is None else collector.prompt_logits,
        )


def _rank(answer: Answer) -> tuple[bool, float]:
    return answer.finish_reason in ("error", "cancelled"), -(answer.cumulative_logprob or 0.0)


def _simple(logprobs: Sequence[list[TokenLogprob]]) -> list[float]:
    return [one[0].logprob for one in logprobs]
