"""`SamplingParams`: the one record of a request's sampling controls, from parsing to the sampler.

The names, defaults and errors are those of ``tensorrt_llm.SamplingParams`` (1.3 release
candidates); `allowed_token_ids`, `bad_words_token_ids` and a guide's `choice`, which it lacks, are
vLLM's. Rules that TensorRT-LLM leaves to its C++ layer (ranges of ``max_tokens``, ``seed``, the
penalties, ...) are checked here too, because there they end the request late or, in some versions,
the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

from adapters.contract import MAX_INT
from adapters.processors.grammar import Choice, Grammar, JsonSchema, Regex
from adapters.processors.length import MinTokens
from adapters.processors.masks import AllowedTokens, BadWords, BannedTokens
from adapters.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from adapters.processors.repetition import NoRepeatNgram
from adapters.processors.structural import StructuralTag
from adapters.processors.thinking import ThinkingBudget
from adapters.processors.truncation import MinP, Temperature, TopK, TopP
from worker.sampling.control import (
    NEVER,
    Integer,
    Number,
    RunsAs,
    about_text,
    cached,
    control,
    refused,
    sampling_controls,
)
from worker.sampling.guides import GuidedDecodingParams, structural_format

MAX_LOGPROBS = 100
"""Largest top-n of log probabilities, TensorRT-LLM's limit."""

LOGPROBS_MODES = ("raw", "processed", "train")
"""Distributions that log probabilities are of: the model's own, the one that was sampled from, or
for a trainer all that `TokenLogprob` has.
"""

_SEEDS = 2**64
_BEAMS = "this worker has no beam search"
_OUTPUT = "this worker returns token ids and log probabilities only"
_TEXT = "the engine works on token ids; the runtime applies it"
_DECAY = "this worker does not decay top_p"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling controls of one request. Nothing set means greedy, as in TensorRT-LLM.

    A worker fills in the model's own values before (`worker.requests.sampling_defaults`).

    Everything that is said of a field stands beside it (`worker.sampling.control`). Controls that
    run as processors stand in the order in which those of one stage are applied.

    ``logits_processor`` holds callables ``(req_id, logits[1, 1, V], token_ids, stream_ptr,
    client_id)``, as made by `adapters.create_trtllm_adapters`. ``stop_token_ids`` end an answer;
    the stop token itself is part of the output only with ``include_stop_str_in_output``. ``end_id``
    is one more stop token unless ``ignore_eos``.

    Raises:
        ValueError: a value is out of its range; the message starts with the field's name.
    """

    # number of answers
    n: int = control(default=1, bounds=Integer(1))
    best_of: int | None = control(bounds=Integer(1))

    # how an answer ends
    end_id: int | None = control()
    stop_token_ids: list[int] | None = control()
    include_stop_str_in_output: bool = control(default=False)
    ignore_eos: bool = control(
        default=False,
        paths="stop_conditions.ignore_eos",
        client_form="forwarded",
        summary="The model's end tokens do not end the answer; "
        "the frontend then also clears stop strings and stop token ids.",
    )
    max_tokens: int | None = control(
        default=32,
        bounds=Integer(1),
        client=Integer(1, MAX_INT),
        paths="stop_conditions.max_tokens",
        client_form="forwarded",
        summary="Tokens to generate at most; absent or past the end of the context means up to the end of the context.",
    )
    min_tokens: int | None = control(
        RunsAs(MinTokens, "n"),
        bounds=Integer(0),
        client=Integer(0, MAX_INT),
        neutral=0,
        paths="stop_conditions.min_tokens",
        client_form="forwarded",
        summary="No stop token ends the answer before; more than max_tokens means exactly max_tokens.",
    )

    # bias, penalties, masks
    embedding_bias: Any | None = control()
    repetition_penalty: float | None = control(
        RunsAs(RepetitionPenalty, "penalty"),
        bounds=Number(0, above_low=True),
        client=Number(0.01, 100),
        neutral=1,
        paths="sampling_options.repetition_penalty",
        client_form="forwarded",
        frontend_bounds=Number(0, 2, above_low=True),
        summary="Scales the logits of all tokens of prompt and answer away from being sampled (below 1: towards).",
    )
    frequency_penalty: float | None = control(
        RunsAs(FrequencyPenalty, "penalty"),
        bounds=Number(),
        client=Number(-2, 2),
        neutral=0,
        paths="sampling_options.frequency_penalty",
        client_form="forwarded",
        frontend_bounds=Number(-2, 2),
        summary="As presence_penalty, times how often the answer has the token.",
    )
    presence_penalty: float | None = control(
        RunsAs(PresencePenalty, "penalty"),
        bounds=Number(),
        client=Number(-2, 2),
        neutral=0,
        paths="sampling_options.presence_penalty",
        client_form="forwarded",
        frontend_bounds=Number(-2, 2),
        summary="Subtracted once from the logit of every token that the answer has.",
    )
    no_repeat_ngram_size: int | None = control(RunsAs(NoRepeatNgram, "n"), bounds=Integer(1))
    bad_token_ids: list[int] | None = control(RunsAs(BannedTokens, "token_ids"), neutral=[])
    logits_processor: Callable[..., None] | list[Callable[..., None]] | None = control()

    # temperature and truncation
    temperature: float | None = control(
        RunsAs(Temperature, "value"),
        bounds=Number(0),
        client=Number(0, 100),
        neutral=1,
        greedy=0,
        samples="if set",
        paths="sampling_options.temperature",
        client_form="forwarded",
        frontend_bounds=Number(0, 2),
        summary="0 is greedy. Unset is the model's own temperature, or greedy where it has none (--default-sampling).",
    )
    min_p: float | None = control(
        RunsAs(MinP, "p"),
        bounds=Number(0, 1),
        neutral=0,
        greedy=1,
        samples="if active",
        paths="sampling_options.min_p",
        client_form="forwarded",
        summary="Tokens less likely than this times the most likely one are not sampled.",
    )
    top_k: int | None = control(
        RunsAs(TopK, "k"),
        bounds=Integer(0),
        client=Integer(-1, MAX_INT),
        from_client=lambda k: max(k, 0),
        neutral=0,
        greedy=1,
        samples="if set",
        paths="sampling_options.top_k",
        client_form="forwarded",
        summary="Tokens to sample from; -1 and 0 mean all.",
    )
    top_p: float | None = control(
        RunsAs(TopP, "p"),
        bounds=Number(0, 1),
        neutral=1,
        greedy=0,
        samples="if set",
        paths="sampling_options.top_p",
        client_form="forwarded",
        summary="Shortest prefix of the ranked tokens whose mass reaches it.",
    )
    seed: int | None = control(
        bounds=Integer(0, _SEEDS - 1),
        client=Integer(-(_SEEDS // 2), _SEEDS - 1),
        from_client=lambda seed: seed % _SEEDS,
        paths="sampling_options.seed",
        client_form="forwarded",
        summary="Fixes the random numbers; negative seeds are taken modulo 2^64.",
    )

    # processors that `ChainBuilder` makes, because they need the tokenizer or the grammar compiler
    bad: str | list[str] | None = refused(
        "the engine works on token ids; name them in bad_token_ids",
        None,
        RunsAs(BadWords, "words", convert=lambda words: [words] if isinstance(words, str) else words),
        neutral=[],
    )
    bad_words_token_ids: list[list[int]] | None = refused(
        "bad words reach the engine as a logits_processor",
        None,
        RunsAs(BadWords, "token_ids"),
        neutral=[],
        paths=("sampling_options.bad_words_token_ids", "extra_args.sampling_options.bad_words_token_ids"),
        client_form="forwarded",
        summary="Runs as the processor bad_words: sequences of token ids that the answer must not have.",
    )
    allowed_token_ids: list[int] | None = refused(
        "allowed tokens reach the engine as a logits_processor",
        None,
        RunsAs(AllowedTokens, "token_ids", fixed={"allow_end": False}),
        paths=("sampling_options.allowed_token_ids", "extra_args.sampling_options.allowed_token_ids"),
        client_form="forwarded",
        summary="Runs as the processor allowed_tokens: only these. An end token, too, must be listed, as in vLLM.",
    )
    thinking_token_budget: int | None = refused(
        "thinking budgets reach the engine as a logits_processor",
        None,
        RunsAs(ThinkingBudget, "tokens"),
        bounds=Integer(-1),
        client=Integer(0, MAX_INT),
        neutral=-1,
        paths="stop_conditions.max_thinking_tokens",
        client_form="forwarded",
        summary="Runs as the processor thinking_budget; refused for a model without thinking tags.",
    )
    guided_decoding: GuidedDecodingParams | None = refused(
        "grammars reach the engine as a logits_processor",
        None,
        RunsAs(JsonSchema, "schema", "json"),
        RunsAs(JsonSchema, "schema", "json_object", convert=lambda wanted: {"type": "object"} if wanted else None),
        RunsAs(Regex, "pattern", "regex"),
        RunsAs(Choice, "choices", "choice"),
        RunsAs(Grammar, "lark", "grammar"),
        RunsAs(StructuralTag, "format", "structural_tag", convert=structural_format),
        paths="sampling_options.guided_decoding",
        client_form="derived",
        summary="Runs as the processor json_schema, regex, choice, grammar or structural_tag; "
        "with require_reasoning after the thinking.",
    )

    # log probabilities
    logprobs: int | None = control(
        bounds=Integer(0, MAX_LOGPROBS),
        paths="output_options.logprobs",
        client_form="derived",
        summary="Alternatives to report per token; 0 is the sampled token alone.",
    )
    logprobs_mode: str = control(
        default="raw",
        paths="output_options.logprobs_mode",
        client_form="derived",
        summary="Distribution that log probabilities are of: raw, the model's own; processed, what was sampled from; "
        "train, raw ones and beside them all that a trainer needs (docs/request.md).",
    )
    prompt_logprobs: int | None = control(
        bounds=Integer(0, MAX_LOGPROBS),
        paths="output_options.prompt_logprobs",
        client_form="derived",
        summary="Alternatives to report per token of the prompt; 0 is the token itself alone.",
    )

    # not served
    apply_batched_logits_processor: bool = control(default=False)
    lookahead_config: Any | None = control()
    use_beam_search: bool = refused(_BEAMS, False)
    beam_search_diversity_rate: float | None = refused(_BEAMS, bounds=Number(0))
    length_penalty: float | None = refused(_BEAMS, bounds=Number())
    early_stopping: int | None = refused(_BEAMS)
    beam_width_array: list[int] | None = refused(_BEAMS)
    stop: str | list[str] | None = refused(_TEXT)
    truncate_prompt_tokens: int | None = refused(_TEXT, bounds=Integer(1))
    top_p_min: float | None = refused(_DECAY, bounds=Number(0, 1, above_low=True))
    top_p_reset_ids: int | None = refused(_DECAY, bounds=Integer(0))
    top_p_decay: float | None = refused(_DECAY, bounds=Number(0, 1, above_low=True), neutral=1, samples="if active")
    prompt_ignore_length: int | None = refused(
        "the presence and frequency penalties count generated tokens alone", bounds=Integer(0)
    )
    logprobs_simple_format: bool = refused(_OUTPUT, False)
    prompt_logprobs_simple_format: bool = refused(_OUTPUT, False)
    return_context_logits: bool = refused(_OUTPUT, False)
    return_generation_logits: bool = refused(_OUTPUT, False)
    exclude_input_from_output: bool = refused(_OUTPUT, True)
    return_encoder_output: bool = refused(_OUTPUT, False)
    return_perf_metrics: bool = refused(_OUTPUT, False)
    additional_model_outputs: list[str] | None = refused(_OUTPUT)

    # without effect on token ids
    pad_id: int | None = about_text()
    detokenize: bool = about_text(True)
    add_special_tokens: bool = about_text(True)
    skip_special_tokens: bool = about_text(True)
    spaces_between_special_tokens: bool = about_text(True)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        self.logprobs = _logprob_count(self.logprobs)
        if self.logprobs_mode == "train" and self.logprobs is None:
            self.logprobs = 0
        self.prompt_logprobs = _logprob_count(self.prompt_logprobs)
        self._validate()

    def _validate(self) -> None:
        for name, bounds in _bounds(type(self)):
            value = getattr(self, name)
            if value is not None:
                _check(name, value, bounds)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.best_of is not None and self.best_of > 1 and not self.use_beam_search and self.is_greedy:
            name = "best_of" if self.best_of > self.n else "n"
            raise ValueError(f"{name} must be 1 when decoding is greedy, got {self.best_of}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}")
        if self.logprobs_simple_format and (self.logprobs != 0 or self.use_beam_search):
            raise ValueError("logprobs_simple_format needs logprobs=0 and no beam search")
        if self.guided_decoding is not None:
            if not isinstance(self.guided_decoding, GuidedDecodingParams):
                raise ValueError(
                    f"guided_decoding must be GuidedDecodingParams, got {type(self.guided_decoding).__name__}"
                )
            self.guided_decoding.validate()
        for processor in self.logits_processors:
            if not callable(processor):
                raise ValueError(f"logits_processor must be callable, got {type(processor).__name__}")

    def with_values(self, **values: Any) -> SamplingParams:
        """A copy with other values of some fields. Where they are None or seeds, nothing else is
        checked again, as `dataclasses.replace` does.

        Raises:
            ValueError: as for a new record.
        """
        made = object.__new__(type(self))
        for name in _names(type(self)):
            setattr(made, name, getattr(self, name))
        for name, value in values.items():
            setattr(made, name, value)
        if any(value is not None and name != "seed" for name, value in values.items()):
            made.__post_init__()
        elif values.get("seed") is not None:
            _check("seed", values["seed"], Integer(0, _SEEDS - 1))
        return made

    @property
    def is_greedy(self) -> bool:
        """TensorRT-LLM's rule: a control is at its greedy value, or none asks for sampling.

        Never with beams.
        """
        if self.use_beam_search:
            return False
        greedy, sampling = _greedy_rules(type(self))
        for name, value in greedy:
            if getattr(self, name) == value:
                return True
        for name, neutral in sampling:
            value = getattr(self, name)
            if value is not None and value != neutral:
                return False
        return True

    @property
    def logits_processors(self) -> list[Callable[..., None]]:
        """The logits processors as a list, empty when there are none."""
        if self.logits_processor is None:
            return []
        return self.logits_processor if isinstance(self.logits_processor, list) else [self.logits_processor]

    @property
    def end_token_ids(self) -> frozenset[int]:
        """``stop_token_ids``, and ``end_id`` unless ``ignore_eos``: what ends an answer."""
        ids = set(self.stop_token_ids or ())
        if self.end_id is not None and not self.ignore_eos:
            ids.add(self.end_id)
        return frozenset(ids)

    def ends_with(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """`end_token_ids`, and the model's own end tokens unless ``ignore_eos``."""
        return self.end_token_ids | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))


@cached
def _names(record: type[SamplingParams]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(record))


@cached
def _bounds(record: type[SamplingParams]) -> tuple[tuple[str, Number | Integer], ...]:
    return tuple((one.name, one.bounds) for one in sampling_controls(record) if one.bounds is not None)


@cached
def _greedy_rules(record: type[SamplingParams]) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]:
    """Names with the greedy value; names of what asks for sampling, and the value that does not."""
    controls = sampling_controls(record)
    greedy = tuple((one.name, one.greedy) for one in controls if one.greedy is not NEVER)
    sampling = [one for one in controls if one.samples is not None]
    return greedy, tuple((one.name, NEVER if one.samples == "if set" else one.neutral) for one in sampling)


def _check(name: str, value: Any, bounds: Number | Integer) -> None:
    try:
        bounds.check(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _logprob_count(value: int | bool | None) -> int | None:
    """True means the sampled token alone (0), False means none (TensorRT-LLM's coercion)."""
    if isinstance(value, bool):
        return 0 if value else None
    return value
