"""A request as Dynamo delivers it → a `GenerationRequest`: typed, bounded, every field accounted
for.

What becomes of each field is in `worker.requests.fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import InvalidRequest
from worker.requests.fields import FIELDS, SECTIONS, shown

_BY_PATH = {row.path: row for row in FIELDS}
_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the engine that serves the request allows.

    Attributes:
        context_length: Longest prompt + answer, in tokens.
        vocab_size: Token ids are below it.
    """

    context_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to generate. Every number is in range; every token id is in the vocabulary.

    Attributes:
        model: Name that the client asked for; empty in a health probe.
        prompt_token_ids: The prompt, at least one token and at most ``context_length - 1``.
        max_tokens: Tokens to generate at most, never past the end of the context.
        min_tokens: Tokens to generate before any stop token may end the answer; at most
            ``max_tokens``. None if the client did not set it, as of every control that is a
            processor by another name (`worker.sampling.controls`).
        stop_token_ids: Ids that end the answer and are shown only with ``include_stop``.
        stop_token_ids_visible: Ids that end the answer and are shown.
        stop_token_ids_hidden: Ids that end the answer and are never shown; the model's end tokens
            are among them.
        seed: Of the draws, in 0 … 2^64 - 1; a negative seed of the client is taken modulo 2^64.
        top_k: 0 means off.
        logprobs: Alternatives to report per token, 0 for the chosen token alone, None for no log
            probabilities.
        allowed_token_ids: The only ids that may be sampled, end tokens too; None for all.
        bad_words_token_ids: Sequences of ids that the answer must not have; None for none.
        max_thinking_tokens: Most tokens of thinking, None for no limit.
        guided_decoding: One of ``json``, ``regex``, ``choice``, ``grammar`` and its guide, None for
            no grammar.
        require_reasoning: Whether the grammar starts after the thinking.
        annotations: The client's annotations, verbatim.
        cache_salt: Requests share KV only with those of the same salt.
        prefill_result: Parameters of the KV transfer, with the frontend's additions; None
            without one.
        is_probe: Whether this is the runtime's health probe.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    min_tokens: int | None = None
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop_token_ids_visible: frozenset[int] = frozenset()
    stop_token_ids_hidden: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    allowed_token_ids: frozenset[int] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None
    max_thinking_tokens: int | None = None
    guided_decoding: Mapping[str, Any] | None = None
    require_reasoning: bool = False
    annotations: tuple[str, ...] = ()
    cache_salt: str | None = None
    prefill_result: Mapping[str, Any] | None = None
    is_probe: bool = False

    @property
    def shown_stop_token_ids(self) -> frozenset[int]:
        """Stop tokens that are part of the answer that they end."""
        shown = self.stop_token_ids_visible | (self.stop_token_ids if self.include_stop else frozenset())
        return shown - self.stop_token_ids_hidden


def parse_request(request: Mapping[str, Any], limits: RequestLimits) -> GenerationRequest:
    """The typed request.

    Raises:
        InvalidRequest: a field is unknown, unsupported, malformed or out of range.
    """
    values: dict[str, Any] = {}
    _read("", request, values)
    return _bounded(values, limits)


def _read(prefix: str, section: Any, values: dict[str, Any]) -> None:
    """Every field of `section` that is set, into `values`; null means unset everywhere."""
    if not isinstance(section, (dict, Mapping)):
        raise InvalidRequest(prefix.rstrip(".") or "request", f"must be a mapping, got {shown(section)}")
    for name, value in section.items():
        if value is None:
            continue
        path = f"{prefix}{name}"
        if path in SECTIONS:
            _read(f"{path}.", value, values)
            continue
        row = _BY_PATH.get(path)
        if row is None:
            raise InvalidRequest(shown(path).strip("'"), "unknown field")
        if row.fate == "refused" and not _asks_for_nothing(value, row.neutral):
            raise InvalidRequest(path, row.why)
        parsed = row.parse(path, value) if row.parse is not None else None
        if row.target is not None:
            values[row.target] = parsed


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, (Mapping, list, tuple, str)):
        return len(value) == 0
    return any(type(value) in (type(item), float) and value == item for item in neutral)


def _bounded(values: dict[str, Any], limits: RequestLimits) -> GenerationRequest:
    prompt = values.pop("prompt_token_ids", None)
    if not prompt:
        raise InvalidRequest("token_ids", "the prompt is empty")
    _check_vocabulary("token_ids", min(prompt), max(prompt), limits)
    room = limits.context_length - len(prompt)
    if room < 1:
        raise InvalidRequest(
            "token_ids",
            f"the prompt has {len(prompt)} tokens, but prompt and answer share a context of {limits.context_length}",
        )
    _merge_end_tokens(values, limits)
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)
    if "seed" in values:
        values["seed"] %= _SEEDS
    max_tokens = min(values.pop("max_tokens", room), room)
    if "min_tokens" in values:
        values["min_tokens"] = min(values["min_tokens"], max_tokens)
    return GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens, **values)


def _merge_end_tokens(values: dict[str, Any], limits: RequestLimits) -> None:
    end_tokens = values.pop("eos_token_ids", frozenset())
    for name in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"):
        ids = values.get(name)
        if ids:
            _check_vocabulary(f"stop_conditions.{name}", min(ids), max(ids), limits)
    if end_tokens:
        _check_vocabulary("eos_token_ids", min(end_tokens), max(end_tokens), limits)
    if not values.get("ignore_eos", False):
        values["stop_token_ids_hidden"] = values.get("stop_token_ids_hidden", frozenset()) | end_tokens


def _check_vocabulary(path: str, lowest: int, highest: int, limits: RequestLimits) -> None:
    for token_id in (lowest, highest):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(path, f"token id {shown(token_id)} is not in the vocabulary of {limits.vocab_size}")
