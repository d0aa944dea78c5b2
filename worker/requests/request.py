"""A request as Dynamo delivers it → a `GenerationRequest`, its controls in `SamplingParams`.

Each field has a row in `worker.requests.fields`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.engines.images import FIELD as IMAGES
from worker.engines.images import ImageInput
from worker.errors import PROMPT_TOO_LONG, InvalidRequest, shown
from worker.requests.continuation import NO_DIGESTS, Continuation, ControlDigests
from worker.requests.fields import logprobs_mode, request_fields, sections_of
from worker.sampling import MAX_LOGPROBS, SamplingParams, sampling_controls

_END_PATHS = (
    "stop_conditions.stop_token_ids",
    "stop_conditions.stop_token_ids_visible",
    "stop_conditions.stop_token_ids_hidden",
    "eos_token_ids",
)

MAX_PROMPT_LOGPROBS = 131_072
"""Log probabilities of one prompt, tokens times those of each: about 5 MB of JSON in one chunk."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the engine that serves the request.

    Attributes:
        context_length: Longest prompt + answer, in tokens.
        vocab_size: Token ids are below it.
        eos_token_ids: The model's end tokens.
        numerics: Numerics of its answers; see `EngineInfo.made_by`.
        kv_dtype: See `EngineInfo.kv_dtype`.
        takes_images: Whether it serves pictures.
        only_prefills: Whether ``max_tokens`` is that of the prefill alone, not of the answer.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    numerics: str = ""
    kv_dtype: str = ""
    takes_images: bool = False
    only_prefills: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to generate. Every number is in range; every token id is in the vocabulary.

    Attributes:
        prompt_token_ids: The prompt, at least one token and at most ``context_length - 1``.
        generated_token_ids: The answer's tokens so far, if the request was migrated, by the field
            ``continues`` or by `worker.migration.boundary.continuation`.
        params: The sampling controls; None in it is what the client did not set. ``max_tokens``
            never leads past the end of the context, ``min_tokens`` not past ``max_tokens`` but
            where that is of the prefill alone. The model's end tokens end the answer unless
            ``ignore_eos``. If any stop token is shown, the engine shows all of them and
            `worker.requests.response` drops the hidden ones again, because `SamplingParams` has one
            switch for both kinds.
        shown_stop_token_ids: Stop tokens that are part of the answer that they end.
        stop_strings: The frontend matches them.
        model: Name that the client asked for; empty in a health probe.
        require_reasoning: Whether the grammar starts after the thinking.
        hides_logprobs: Whether log probabilities of the answer are for its `RolloutData` alone.
        returns_token_ids: Whether the ids of prompt and answer were asked for.
        annotations: The client's annotations, verbatim.
        cache_salt: Requests share KV only with those of the same salt.
        lora_name: LoRA adapter that the client chose as its model; None for the model itself.
        images: Pictures of the prompt.
        lora_digest: Digest of the adapter of that name that this worker has, set by `Preparation`.
        draft_model: `EngineInfo.draft_model`, set by `Preparation` where a processor computes with
            it; else None.
        priority: Urgency beside other requests; 0 is usual, and more is sooner.
        dp_rank: Data parallel rank that the router chose, None where it chose none.
        session_id: Session of the client that it belongs to, None where the client says none.
        prefill_result: Parameters of the KV transfer, with the frontend's additions; None
            without one.
        is_probe: Whether this is the runtime's health probe.
        continues: Part of the answer that another worker generated, as its client says it; None if
            it says nothing.
        controls: This worker's part in its controls, set by `Preparation` where an answer may go on
            elsewhere, or comes from there.
    """

    prompt_token_ids: list[int]
    generated_token_ids: list[int] = field(default_factory=list)
    params: SamplingParams
    shown_stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    model: str = ""
    require_reasoning: bool = False
    hides_logprobs: bool = False
    returns_token_ids: bool = False
    annotations: tuple[str, ...] = ()
    cache_salt: str | None = None
    lora_name: str | None = None
    images: tuple[ImageInput, ...] = ()
    lora_digest: str | None = None
    draft_model: str | None = None
    priority: float = 0
    dp_rank: int | None = None
    session_id: str | None = None
    prefill_result: Mapping[str, Any] | None = None
    is_probe: bool = False
    continues: Continuation | None = None
    controls: ControlDigests = NO_DIGESTS

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt_token_ids + self.generated_token_ids

    @property
    def beside_model(self) -> str:
        """Weights beside the model's own that its answer is computed with: digest of the adapter,
        and the draft model; empty without either. Workers that exchange it must agree.
        """
        draft = f"draft model {self.draft_model}" if self.draft_model is not None else None
        return "; ".join(filter(None, (self.lora_digest, draft)))


class RequestTable:
    """The fields that a request may have.

    Args:
        record: Class of its sampling controls.
    """

    def __init__(self, record: type[SamplingParams] = SamplingParams) -> None:
        rows = request_fields(record)
        self.record = record
        self.by_path = {row.path: row for row in rows}
        self.sections = sections_of(rows)
        self.controls = frozenset(control.name for control in sampling_controls(record) if control.paths)


SERVED = RequestTable()
"""The requests that this worker serves."""


def parse_request(request: Mapping[str, Any], limits: RequestLimits, table: RequestTable = SERVED) -> GenerationRequest:
    """The typed request.

    Args:
        request: Mapping that the frontend sends.
        limits: Limits of the engine.
        table: Fields that it may have.

    Raises:
        InvalidRequest: a field is unknown, unsupported, malformed or out of range.
    """
    values: dict[str, Any] = {}
    _read("", request, values, table)
    return _bounded(values, limits, table)


def _read(prefix: str, section: Any, values: dict[str, Any], table: RequestTable) -> None:
    """Every field of `section` that is set, into `values`; null means unset everywhere."""
    if not isinstance(section, (dict, Mapping)):
        raise InvalidRequest(prefix.rstrip(".") or "request", f"must be a mapping, got {shown(section)}")
    for name, value in section.items():
        if value is None:
            continue
        path = f"{prefix}{name}"
        if path in table.sections:
            _read(f"{path}.", value, values, table)
            continue
        row = table.by_path.get(path)
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


def _bounded(values: dict[str, Any], limits: RequestLimits, table: RequestTable) -> GenerationRequest:
    prompt = values.pop("prompt_token_ids", None)
    if not prompt:
        raise InvalidRequest("token_ids", "the prompt is empty")
    _check_vocabulary("token_ids", min(prompt), max(prompt), limits)
    continues: Continuation | None = values.get("continues")
    generated: list[int] = []
    if continues is not None:
        continues.check(len(prompt), values.get("seed"), limits.numerics, limits.kv_dtype)
        prompt, generated = prompt[: -continues.generated_tokens], prompt[-continues.generated_tokens :]
    room = limits.context_length - len(prompt)
    if room < 1:
        most = f"this model's maximum context length is {limits.context_length} tokens, of prompt and answer together"
        raise InvalidRequest("token_ids", f"{PROMPT_TOO_LONG} {len(prompt)} tokens, and {most}")
    _check_images(values, limits)
    _read_annotations(values)
    controls = {name: values.pop(name) for name in table.controls & values.keys()}
    _check_scored(len(prompt), controls.get("prompt_logprobs"))
    controls["max_tokens"] = min(controls.get("max_tokens", room), room)
    if "min_tokens" in controls and not limits.only_prefills:
        controls["min_tokens"] = min(controls["min_tokens"], controls["max_tokens"])
    if len(generated) >= controls["max_tokens"]:
        raise InvalidRequest("continues.generated_tokens", f"must be below the {controls['max_tokens']} of the answer")
    ends, shown_ids = _ends(values, controls.get("ignore_eos", False), limits)
    params = table.record(**controls, **ends, detokenize=False)
    if controls.get("logprobs") is None and controls.get("logprobs_mode") == "train":
        values["hides_logprobs"] = True
    return GenerationRequest(
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        params=params,
        shown_stop_token_ids=shown_ids,
        **values,
    )


RETURN_TOKEN_IDS = "return_token_ids"
"""Annotation, and field of ``output_options``."""

LOGPROBS_MODE = "logprobs_mode:"
"""Beginning of an annotation; ``output_options`` has a field of that name."""

TOP_LOGPROBS = "top_logprobs:"
"""Beginning of an annotation: alternatives to report per token, beside ``logprobs_mode:train``."""

_COUNT = re.compile(r"[0-9]{1,9}")


def asks_for_rollout(annotations: Iterable[str]) -> bool:
    """Whether annotations ask for what `worker.requests.rollout` says of tokens."""
    return not {RETURN_TOKEN_IDS, f"{LOGPROBS_MODE}train"}.isdisjoint(annotations)


def _read_annotations(values: dict[str, Any]) -> None:
    """Set what annotations ask for: Dynamo's frontend has no fields for it."""
    for annotation in values.get("annotations", ()):
        if annotation == RETURN_TOKEN_IDS:
            values["returns_token_ids"] = True
        elif annotation.startswith(LOGPROBS_MODE):
            values["logprobs_mode"] = logprobs_mode("annotations", annotation.removeprefix(LOGPROBS_MODE))
        elif annotation.startswith(TOP_LOGPROBS):
            count = annotation.removeprefix(TOP_LOGPROBS)
            if not _COUNT.fullmatch(count) or int(count) > MAX_LOGPROBS:
                raise InvalidRequest("annotations", f"{TOP_LOGPROBS}N needs an integer from 0 to {MAX_LOGPROBS}")
            values.setdefault("logprobs", int(count))
            values["hides_logprobs"] = True


def _check_images(values: Mapping[str, Any], limits: RequestLimits) -> None:
    if not values.get("images"):
        return
    if not limits.takes_images:
        problem = "this worker serves text only; --engine vllm and trtllm take pictures with --modality multimodal"
        raise InvalidRequest(IMAGES, problem)
    if values.get("prompt_logprobs") is not None:
        problem = f"cannot be given beside {IMAGES}: a picture becomes tokens that the prompt does not have"
        raise InvalidRequest("output_options.prompt_logprobs", problem)


def _check_scored(num_tokens: int, alternatives: int | None) -> None:
    """Refuse more log probabilities of the prompt than one chunk may carry."""
    if alternatives is not None and num_tokens * (1 + alternatives) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            "output_options.prompt_logprobs",
            f"a prompt of {num_tokens} tokens with {alternatives} alternatives each has more than "
            f"{MAX_PROMPT_LOGPROBS} log probabilities; ask for fewer alternatives, or score a shorter prompt",
        )


def _ends(values: dict[str, Any], ignore_eos: bool, limits: RequestLimits) -> tuple[dict[str, Any], frozenset[int]]:
    """The ends of an answer in ``values``: fields of `SamplingParams`, and shown stop tokens."""
    given: list[frozenset[int]] = [values.pop(path.rpartition(".")[2], frozenset()) for path in _END_PATHS]
    for path, ids in zip(_END_PATHS, given, strict=True):
        if ids:
            _check_vocabulary(path, min(ids), max(ids), limits)
    plain, visible, hidden, eos = given
    if not ignore_eos:
        hidden |= eos | frozenset(limits.eos_token_ids)
    shown_ids = (visible | (plain if values.pop("include_stop", False) else frozenset())) - hidden
    ends = plain | visible | hidden
    fields = {
        "end_id": limits.eos_token_ids[0] if limits.eos_token_ids else None,
        "stop_token_ids": sorted(ends) or None,
        "include_stop_str_in_output": bool(shown_ids),
    }
    return fields, shown_ids


def _check_vocabulary(path: str, lowest: int, highest: int, limits: RequestLimits) -> None:
    for token_id in (lowest, highest):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(path, f"token id {shown(token_id)} is not in the vocabulary of {limits.vocab_size}")
