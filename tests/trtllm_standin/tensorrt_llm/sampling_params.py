"""`SamplingParams` and what belongs to it."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, List, Optional, Tuple, Union

import torch
from pydantic import BaseModel

from tensorrt_llm.standin_switches import SWITCHES


class LogprobMode(str, Enum):
    RAW = "raw"
    PROCESSED = "processed"


class LogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: List[List[int]],
        stream_ptr: Optional[int],
        client_id: Optional[int],
    ) -> None: ...


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Optional[Union[str, BaseModel, dict]] = None
    regex: Optional[str] = None
    grammar: Optional[str] = None
    json_object: bool = False
    structural_tag: Optional[str] = None

    def _validate(self) -> None:
        if sum(bool(getattr(self, f.name)) for f in fields(self)) > 1:
            raise ValueError("only one guide may be given")


class _Rules:
    """Normalisation and validation, of either version."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        if self.embedding_bias is not None:
            bias = self.embedding_bias
            is_tensor = isinstance(bias, torch.Tensor)
            self.embedding_bias = bias.detach().clone() if is_tensor else torch.tensor(bias, dtype=torch.float32)
        if self._is_old():
            self.logprobs = 1 if self.logprobs is True else self.logprobs
            self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
            self._validate_old()
        else:
            self.logprobs = (
                {True: 0, False: None}.get(self.logprobs, self.logprobs)
                if type(self.logprobs) is bool
                else self.logprobs
            )
            self._validate_new()
            if self.thinking_token_budget == -1:
                self.thinking_token_budget = None
        self._validate_both()

    @classmethod
    def _is_old(cls) -> bool:
        return "logprobs_mode" not in cls.__dataclass_fields__

    def _apply_generation_config_defaults(self: Any, generation_config: dict[str, Any]) -> None:
        """Fill in the model's default where nothing is set."""
        names = ("early_stopping", "length_penalty", "min_p", "no_repeat_ngram_size")
        for name in (*names, "repetition_penalty", "temperature", "top_k", "top_p"):
            value = generation_config.get(name)
            if getattr(self, name) is None and value is not None:
                setattr(self, name, value)
        self.__post_init__()

    @property
    def _greedy_decoding(self: Any) -> bool:
        if self.use_beam_search:
            return False
        if self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0:
            return True
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        if self._is_old():
            return unset
        if self.min_p == 1.0:
            return True
        return unset and not (self.min_p or 0) > 0 and not (self.top_p_decay or 1) < 1

    def _validate_both(self: Any) -> None:
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        allowed = os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING")
        if self.best_of > 1 and self._greedy_decoding and not allowed:
            raise ValueError("best_of > 1 is not allowed under greedy decoding")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError("truncate_prompt_tokens must be >= 1")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    def _validate_old(self: Any) -> None:
        if self.top_p is not None and (self.top_p < 0 or self.top_p > 1):
            raise ValueError(f"require 0 <= top_p <= 1, got {self.top_p}")
        for name in ("top_k", "temperature"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"require {name} >= 0, got {value}")

    def _validate_new(self: Any) -> None:
        def require(ok: bool, name: str) -> None:
            if not ok:
                raise ValueError(f"invalid {name}: {getattr(self, name)}")

        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, name)
        for name in ("top_p_decay", "top_p_min"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, name)
        for name in ("top_k", "temperature", "top_p_reset_ids"):
            value = getattr(self, name)
            require(value is None or value >= 0, name)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= SWITCHES.max_logprobs, name)
        require(self.logprobs_mode in ("raw", "processed"), "logprobs_mode")
        require(
            not self.logprobs_simple_format or (self.logprobs == 0 and not self.use_beam_search),
            "logprobs_simple_format",
        )
        require(not self.prompt_logprobs_simple_format or self.prompt_logprobs == 0, "prompt_logprobs_simple_format")
        budget = self.thinking_token_budget
        require(budget is None or (type(budget) is int and budget >= -1), "thinking_token_budget")


@dataclass(slots=True, kw_only=True)
class _NewSamplingParams(_Rules):
    end_id: Optional[int] = None
    pad_id: Optional[int] = None
    max_tokens: int = 32
    bad: Optional[Union[str, List[str]]] = None
    bad_token_ids: Optional[List[int]] = None
    _bad_word_ids: Optional[List[List[int]]] = field(default=None, init=False, repr=False)
    stop: Optional[Union[str, List[str]]] = None
    stop_token_ids: Optional[List[int]] = None
    include_stop_str_in_output: bool = False
    _stop_word_ids: Optional[List[List[int]]] = field(default=None, init=False, repr=False)
    embedding_bias: Optional[torch.Tensor] = None
    logits_processor: Optional[Union[LogitsProcessor, List[LogitsProcessor]]] = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: Optional[int] = None
    use_beam_search: bool = False
    logprobs_mode: LogprobMode = LogprobMode.RAW
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    top_p_min: Optional[float] = None
    top_p_reset_ids: Optional[int] = None
    top_p_decay: Optional[float] = None
    seed: Optional[int] = None
    temperature: Optional[float] = None
    min_tokens: Optional[int] = None
    beam_search_diversity_rate: Optional[float] = None
    repetition_penalty: Optional[float] = None
    presence_penalty: Optional[float] = None
    frequency_penalty: Optional[float] = None
    prompt_ignore_length: Optional[int] = None
    length_penalty: Optional[float] = None
    early_stopping: Optional[int] = None
    no_repeat_ngram_size: Optional[int] = None
    min_p: Optional[float] = None
    beam_width_array: Optional[List[int]] = None
    logprobs: Optional[int] = None
    prompt_logprobs: Optional[int] = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Optional[List[str]] = None
    _decoder_output_token_prefix: Tuple[int, ...] = field(default=(), init=False, repr=False)
    _context_logits_auto_enabled: bool = False
    _generation_logits_auto_enabled: bool = False
    _return_log_probs: bool = False
    lookahead_config: Optional[tllme.LookaheadDecodingConfig] = None  # noqa: F821
    guided_decoding: Optional[GuidedDecodingParams] = None
    thinking_token_budget: Optional[int] = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Optional[int] = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stream_interval: Optional[int] = field(default=None, init=False, repr=False)
    _request_provided_fields: Optional[frozenset[str]] = field(default=None, init=False, repr=False)


NOT_IN_OLD = (
    "logprobs_mode",
    "prompt_ignore_length",
    "logprobs_simple_format",
    "prompt_logprobs_simple_format",
    "_decoder_output_token_prefix",
    "thinking_token_budget",
    "_request_provided_fields",
)


def _without(cls: Any, names: Tuple[str, ...]) -> Any:
    """The same dataclass without some fields."""
    kept = [
        (f.name, f.type, field(default=f.default, init=f.init, repr=f.repr)) for f in fields(cls) if f.name not in names
    ]
    return dataclasses.make_dataclass("SamplingParams", kept, bases=(_Rules,), slots=True, kw_only=True)


SamplingParams: Any = _without(_NewSamplingParams, NOT_IN_OLD if SWITCHES.is_old else ())
SamplingParams.__module__ = __name__
SamplingParams.__qualname__ = "SamplingParams"
