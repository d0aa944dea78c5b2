"""Inputs and outputs of the `TextGenerationController`, under Megatron-Core's names."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypedDict

import torch

from worker.engines import FinishReason
from worker.engines.embedded.offline import Completion
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

RequestId = int | str
TopN = dict[int, float]
"""Log probability by token id.

Megatron-Core's is by text, where two ids of equal text are one entry.
"""

MEGATRON_OFF = 0
"""``top_k`` 0 and ``top_p`` 0.0 are off."""

_LISTS = {
    "stop_token_ids": "token ids",
    "stop_words": "texts",
    "logits_processor": "callables",
    "processors": "processors by name",
}
"""Fields that are lists, and what they hold."""


class MaxSequenceLengthOverflowError(InvalidRequest):
    """Prompt and answer together are longer than the engine's context."""


class Status(Enum):
    """Status of a request."""

    WAITING_IN_QUEUE = 1
    ACTIVE = 2
    SUSPENDED = 3
    COMPLETED = 4
    FAILED = 5
    CANCELLED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParams:
    """Sampling controls under Megatron-Core's names and defaults, plus the worker's own.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off, 1 greedy. Applied before `top_p`.
        top_p: 0.0 is off, as is 1.0.
        num_tokens_to_generate: Most tokens of the answer; 0 scores only the prompt; None: up to the
            context length.
        num_tokens_total: The same, with the prompt's tokens; not both.
        termination_id: The token that ends the answer; None: the model's own, -1: none.
        stop_words: Stop strings, independent of token boundaries.
        detokenize_stop_sequence: Keep the stop word or the end token in the answer; special tokens
            are then text.
        add_BOS: Begin a prompt given as text with the tokenizer's first token.
        return_log_probs: Log probabilities of generated tokens, and of the prompt's unless
            `skip_prompt_log_probs`.
        top_n_logprobs: Number of most likely tokens at each position, likewise.
        logprobs_mode: ``raw``: the model's own; ``processed``: the distribution that was sampled.
            The prompt's are raw.
        return_segments: The text of each token.
        return_logits: The rows that tokens were sampled from.
        return_prompt_logits: The rows of the prompt's tokens.
        n: Answers to return.
        best_of: Answers to generate, of which the `n` most likely are returned; `n` by default, and
            where answers are streamed.
        logits_processor: Callables under TensorRT-LLM's contract.
        processors: Logits processors by name, ``{"name": ..., "args": {...}}``.

    Raises:
        ValueError: a value is out of range; the message starts with the field's name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    min_tokens: int = 0
    termination_id: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop_words: Sequence[str] = ()
    detokenize_stop_sequence: bool = False
    add_BOS: bool = False  # noqa: N815  # Megatron-Core's name
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    top_n_logprobs: int = 0
    logprobs_mode: Literal["raw", "processed"] = "raw"
    return_segments: bool = False
    return_logits: bool = False
    return_prompt_logits: bool = False
    n: int = 1
    best_of: int | None = None
    logits_processor: Sequence[Callable[..., None]] = ()
    processors: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise ValueError("num_tokens_total and num_tokens_to_generate must not both be set")
        for name in ("num_tokens_to_generate", "num_tokens_total"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if type(self.top_n_logprobs) is not int or self.top_n_logprobs < 0:
            raise ValueError(f"top_n_logprobs must be an integer of at least 0, got {self.top_n_logprobs!r}")
        for name, kind in _LISTS.items():
            value = getattr(self, name)
            if isinstance(value, str | Mapping) or not isinstance(value, Collection):
                raise ValueError(f"{name} must be a list of {kind}, got {value!r}")
        self.to_sampling_params(1)

    def max_tokens(self, prompt_length: int) -> int | None:
        """Most tokens of an answer to such a prompt, None if only the context limits it."""
        if self.num_tokens_total is not None:
            return max(0, self.num_tokens_total - prompt_length)
        return self.num_tokens_to_generate

    @property
    def wants_logprobs(self) -> bool:
        """Whether any log probabilities are requested."""
        return self.return_log_probs or self.top_n_logprobs > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's are requested too."""
        return self.wants_logprobs and not self.skip_prompt_log_probs

    def to_sampling_params(self, prompt_length: int) -> SamplingParams:
        """The same under the engine's names; 0 tokens to generate become one that is dropped.

        Raises:
            ValueError: as the class.
        """
        most = self.max_tokens(prompt_length)
        return SamplingParams(
            max_tokens=None if most is None else max(1, most),
            min_tokens=self.min_tokens or None,
            end_id=None if self.termination_id == -1 else self.termination_id,
            ignore_eos=self.termination_id == -1,
            stop_token_ids=list(self.stop_token_ids) or None,
            stop=list(self.stop_words) or None,
            include_stop_str_in_output=self.detokenize_stop_sequence,
            skip_special_tokens=not self.detokenize_stop_sequence,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=None if self.top_p == MEGATRON_OFF else self.top_p,
            min_p=self.min_p or None,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.top_n_logprobs if self.wants_logprobs else None,
            prompt_logprobs=self.top_n_logprobs if self.wants_prompt_logprobs else None,
            logprobs_mode=self.logprobs_mode,
            return_generation_logits=self.return_logits,
            return_context_logits=self.return_prompt_logits,
            n=self.n,
            best_of=self.best_of,
            logits_processor=list(self.logits_processor) or None,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class InferenceRequest:
    """A prompt and its results.

    Attributes:
        request_id: The caller's.
        prompt: Text; not needed where `prompt_tokens` are given.
        prompt_tokens: Ids; never changed.
        sampling_params: Sampling controls.
        status: State of the request.
        text: Prompt and answer.
        generated_text: The answer; None without a tokenizer.
        generated_tokens: Token ids of the answer.
        generated_length: Number of `generated_tokens`.
        segments: The text of each token, prompt and answer.
        generated_segments: The answer's alone; in a stream.
        prompt_log_probs: Log probabilities of the prompt's tokens, without the first, which nothing
            precedes.
        prompt_top_n_logprobs: The top-n at the same positions.
        generated_log_probs: Log probabilities of `generated_tokens`.
        generated_top_n_logprobs: The top-n at the same positions.
        prompt_logits: float32 ``[prompt tokens, V]``.
        generated_logits: float32 ``[generated_length, V]``.
        tpot: Seconds per token of `generated_tokens`; the first includes queueing and prefill.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        stop_reason: The stop token or stop word, if one ended the answer.
        error: Reason for a failure.
        completions: All ``n`` answers; the fields above are those of the first.
    """

    request_id: RequestId
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    sampling_params: InferenceParams = field(default_factory=InferenceParams)
    status: Status = Status.WAITING_IN_QUEUE
    text: str | None = None
    generated_text: str | None = None
    generated_tokens: list[int] = field(default_factory=list)
    generated_length: int = 0
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    prompt_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[TopN] | None = None
    generated_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[TopN] | None = None
    prompt_logits: torch.Tensor | None = None
    generated_logits: torch.Tensor | None = None
    tpot: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    completions: list[Completion] = field(default_factory=list)


class DynamicStep(TypedDict):
    """Result of one step of a dynamic batch. The lists of the first four keys correspond.

    Keys:
        active_request_ids: Requests that got a token, once per answer.
        choices: Index of the answer.
        sample: int64, the newest tokens, end tokens too.
        log_probs: Of each, None if not requested: those of its accepted tokens and of the newest
            one, at a request's first step preceded by those of its prompt. Empty for an end token
            that is not shown.
        top_n_logprobs: By index into `active_request_ids`, likewise; None if not requested.
        finished_request_ids: Requests that finished with this step.
        newly_paused_request_ids: Requests suspended since the last step.
        accepted_tokens: int64 ``[answers, most accepted]``, padded with -1: drafted tokens that
            were accepted before `sample`; None where none was.
        cuda_graph_request_count: None: no CUDA graphs.
    """

    active_request_ids: list[RequestId]
    choices: list[int]
    sample: torch.Tensor
    log_probs: list[list[float] | None]
    top_n_logprobs: dict[int, list[TopN]] | None
    finished_request_ids: list[RequestId]
    newly_paused_request_ids: list[RequestId]
    accepted_tokens: torch.Tensor | None
    cuda_graph_request_count: None


class TokenStream:
    """Megatron-Core's ``AsyncStream``: items from any thread, for one consumer.

    Args:
        request_id: Id of its request.
        cancel: Called with the id if the consumer stops before the end.
    """

    def __init__(self, request_id: RequestId, cancel: Callable[[RequestId], object] | None = None) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._items: deque[InferenceRequest] = deque()
        self._failure: BaseException | None = None
        self._finished = False
        self._lock = threading.Lock()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the stream has ended."""
        return self._finished

    def put(self, item: InferenceRequest) -> None:
        """Add an item; after the end it is dropped."""
        with self._lock:
            if not self._finished:
                self._items.append(item)
                self._wake()

    def finish(self, exception: BaseException | None = None) -> None:
        """End the stream; the consumer gets `exception` after the last item. Idempotent."""
        with self._lock:
            if not self._finished:
                self._finished, self._failure = True, exception
                self._wake()

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """The items, for an event loop."""
        try:
            while True:
                with self._lock:
                    items, self._items = self._items, deque()
                    ended = self._finished
                    waiter = self._waiter = asyncio.get_running_loop().create_future()
                for item in items:
                    yield item
                if ended:
                    break
                await waiter
        finally:
            if self._cancel is not None and not self._finished:
                self._cancel(self.request_id)
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        self._waiter = None
        try:
            waiter.get_loop().call_soon_threadsafe(_set, waiter)
        except RuntimeError:
            if not waiter.get_loop().is_closed():  # closed: no consumer is left
                raise


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
