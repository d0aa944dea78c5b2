"""`SamplingParams`: what one request asks of an engine, under TensorRT-LLM's field names, defaults
and rules.

The names, defaults and errors are those of ``tensorrt_llm.SamplingParams`` (1.3 release
candidates), so that an object built here can be handed to TensorRT-LLM field by field. Both engines
take it. Rules that TensorRT-LLM leaves to its C++ layer (ranges of ``max_tokens``, ``seed``, the
penalties, ...) are checked here too, because there they end the request late or, in some versions,
the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

MAX_LOGPROBS = 100
"""Largest top-n of log probabilities, TensorRT-LLM's limit."""


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """A grammar for the answer; at most one field may be set. TensorRT-LLM's class of the same
    name.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def validate(self) -> None:
        """Raises `ValueError` if more than one kind of guide is set."""
        given = [f.name for f in fields(self) if getattr(self, f.name)]
        if len(given) > 1:
            raise ValueError(f"guided_decoding takes one guide, got {' and '.join(given)}")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling controls of one request. Nothing set means greedy, as in TensorRT-LLM.

    ``logits_processor`` holds callables ``(req_id, logits[1, 1, V], token_ids, stream_ptr,
    client_id)``, as made by `adapters.create_trtllm_adapters`. ``stop_token_ids`` end an answer;
    the stop token itself is part of the output only with ``include_stop_str_in_output``. ``end_id``
    is one more stop token unless ``ignore_eos``.

    Raises:
        ValueError: a value is out of its range; the message starts with the field's name.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any | None = None
    logits_processor: Callable[..., None] | list[Callable[..., None]] | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    logprobs_mode: str = "raw"
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    lookahead_config: Any | None = None
    guided_decoding: GuidedDecodingParams | None = None
    thinking_token_budget: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        self.logprobs = _logprob_count(self.logprobs)
        self.prompt_logprobs = _logprob_count(self.prompt_logprobs)
        self._validate()

    def _validate(self) -> None:
        for name, low, high in _RANGES:
            if (value := getattr(self, name)) is not None:
                _check_range(name, value, low, high)
        for name, minimum, maximum in _INTEGER_RANGES:
            if (value := getattr(self, name)) is not None:
                _check_integer(name, value, minimum, maximum)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.best_of is not None and self.best_of > 1 and not self.use_beam_search and self.is_greedy:
            raise ValueError(f"best_of must be 1 when decoding is greedy, got {self.best_of}")
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}")
        if self.logprobs_simple_format and (self.logprobs != 0 or self.use_beam_search):
            raise ValueError("logprobs_simple_format needs logprobs=0 and no beam search")
        if self.guided_decoding is not None:
            self.guided_decoding.validate()
        for processor in self.logits_processors:
            if not callable(processor):
                raise ValueError(f"logits_processor must be callable, got {type(processor).__name__}")

    @property
    def is_greedy(self) -> bool:
        """TensorRT-LLM's rule: nothing set, or temperature 0, top_k 1, top_p 0 or min_p 1; never
        with beams.
        """
        if self.use_beam_search:
            return False
        if self.temperature == 0 or self.top_k == 1 or self.top_p == 0 or self.min_p == 1:
            return True
        unset = self.temperature is None and self.top_k is None and self.top_p is None
        return unset and not self.min_p and (self.top_p_decay is None or self.top_p_decay >= 1)

    @property
    def logits_processors(self) -> list[Callable[..., None]]:
        """The logits processors as a list, empty when there are none."""
        if self.logits_processor is None:
            return []
        return self.logits_processor if isinstance(self.logits_processor, list) else [self.logits_processor]

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token id that ends an answer: ``stop_token_ids``, and ``end_id`` unless
        ``ignore_eos``.
        """
        ids = set(self.stop_token_ids or ())
        if self.end_id is not None and not self.ignore_eos:
            ids.add(self.end_id)
        return frozenset(ids)


# name, lowest, highest; both ends allowed unless the check below says otherwise
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("top_p_min", math.ulp(0.0), 1.0),
    ("top_p_decay", math.ulp(0.0), 1.0),
    ("repetition_penalty", math.ulp(0.0), math.inf),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("length_penalty", -math.inf, math.inf),
    ("beam_search_diversity_rate", 0.0, math.inf),
)

_INTEGER_RANGES: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 1, None),
    ("n", 1, None),
    ("best_of", 1, None),
    ("top_k", 0, None),
    ("seed", 0, 2**64 - 1),
    ("min_tokens", 0, None),
    ("top_p_reset_ids", 0, None),
    ("prompt_ignore_length", 0, None),
    ("no_repeat_ngram_size", 1, None),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("thinking_token_budget", -1, None),
    ("truncate_prompt_tokens", 1, None),
)


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        above = "above 0" if low == math.ulp(0.0) else f"at least {low:g}" if math.isfinite(low) else "a number"
        bound = f"{above} and at most {high:g}" if math.isfinite(high) else f"{above} and finite"
        raise ValueError(f"{name} must be {bound}, got {value!r}")


def _check_integer(name: str, value: object, minimum: int, maximum: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        bound = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} must be {bound}, got {value}")


def _logprob_count(value: int | bool | None) -> int | None:
    """True means the sampled token alone (0), False means none (TensorRT-LLM's coercion)."""
    if isinstance(value, bool):
        return 0 if value else None
    return value
