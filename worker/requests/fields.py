"""Every field that a request from Dynamo can have, and what becomes of it.

A field is *honoured* (part of the `GenerationRequest`), *frontend* (Dynamo's frontend applies it),
*no effect* or *refused* (`InvalidRequest`), with the reason; one without a row is refused.
"""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from adapters.catalog import ANNOTATION, MAX_BYTES
from adapters.processors.arguments import MAX_LIST
from adapters.processors.structural import format_of
from adapters.strict_json import Ambiguous, decoder
from worker.engines.images import FIELD as IMAGES
from worker.engines.images import read_images
from worker.errors import InvalidRequest, shown
from worker.requests.continuation import CONTINUES, continuation
from worker.sampling import LOGPROBS_MODES, Control, GuidedDecodingParams, SamplingParams, sampling_controls

Fate = Literal["honoured", "frontend", "no effect", "refused"]

MAX_ANNOTATIONS = 64
MAX_ANNOTATION_CHARACTERS = 65_536
"""Annotations are a client's free text; all of one request's together may have this many
characters.
"""

MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 64

MAX_PRIORITY = 2**31
"""Highest priority, and of another sign the lowest: vLLM's are 64-bit integers, made of multiples.
"""

SEED_BITS = 53
"""Bits of the seeds that workers draw: integers that every JSON library reads exactly, so that a
client can send the seed of a receipt back.
"""

Parser = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One field that can be in a request.

    Attributes:
        path: Dotted path, for example ``sampling_options.top_p``.
        fate: Whether it is honoured, ignored, refused, or the frontend's.
        why: Effect of it, or the reason why it has none or is refused (then the error's text).
        parse: Parser of honoured and frontend fields: value → typed value, or `InvalidRequest`.
        target: Attribute that an honoured field sets: of `SamplingParams` where it is a control,
            otherwise of the `GenerationRequest`.
        neutral: Values of refused fields that ask for nothing and are let through.
    """

    path: str
    fate: Fate
    why: str
    parse: Parser | None = None
    target: str | None = None
    neutral: tuple[Any, ...] = field(default=(False,))

    @property
    def section(self) -> str:
        """The first part of the path."""
        return self.path.partition(".")[0]


def within_bounds(control: Control) -> Parser:
    """The values of a control that clients may send."""

    def parse(path: str, value: Any) -> Any:
        try:
            return control.field_value(value)
        except ValueError as error:
            raise InvalidRequest(path, str(error)) from None

    return parse


def boolean(path: str, value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(path, f"must be true or false, got {shown(value)}")
    return value


def priority(path: str, value: Any) -> float:
    if type(value) not in (int, float) or value != value:
        raise InvalidRequest(path, f"must be a number, got {shown(value)}")
    if abs(value) > MAX_PRIORITY:
        raise InvalidRequest(path, f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {shown(value)}")
    number: float = value
    return number


def text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(path, f"must be a text, got {shown(value)}")
    return value


def rank(path: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise InvalidRequest(path, f"must be the number of a rank, from 0, got {shown(value)}")
    return value


def session_id(path: str, value: Any) -> str | None:
    """The id of a client's session; None where it has none that a text could be."""
    found = value.get("session_id") if isinstance(value, Mapping) else None
    return found.strip() or None if isinstance(found, str) else None


def prefill_result(path: str, value: Any) -> Mapping[str, Any]:
    """The prefill worker's result, as the frontend passes it on."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"must be a mapping, got {shown(value)}")
    for name in sorted(set(value) - {"disaggregated_params", "prompt_tokens_details"}):
        raise InvalidRequest(f"{path}.{name}", "unknown field")
    return value


def integers(most: int) -> Parser:
    """A list of at most ``most`` integers, as a frozenset."""

    def parse(path: str, value: Any) -> frozenset[int]:
        if not isinstance(value, (list, tuple)) or any(type(item) is not int for item in value):
            raise InvalidRequest(path, f"must be a list of token ids, got {shown(value)}")
        if len(value) > most:
            raise InvalidRequest(path, f"must have at most {most} token ids, got {len(value)}")
        return frozenset(value)

    return parse


def texts(path: str, value: Any, most: int, most_characters: int) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(path, f"must be a list of texts, got {shown(value)}")
    if len(value) > most:
        raise InvalidRequest(path, f"must have at most {most} entries, got {len(value)}")
    characters = sum(map(len, value))
    if characters > most_characters:
        raise InvalidRequest(path, f"must have at most {most_characters} characters in all, got {characters}")
    return tuple(value)


def stop_strings(path: str, value: Any) -> tuple[str, ...]:
    return texts(path, value, MAX_STOP_STRINGS, MAX_ANNOTATION_CHARACTERS)


_FOR_THIS_WORKER = re.compile(r"logits|processor", re.IGNORECASE)


def client_annotations(path: str, value: Any) -> tuple[str, ...]:
    """A client's annotations. One that nearly has the request channel's name is a mistake."""
    entries = texts(path, value, MAX_ANNOTATIONS, MAX_ANNOTATION_CHARACTERS)
    for entry in entries:
        name = entry.partition(":")[0]
        if not entry.startswith(ANNOTATION) and _FOR_THIS_WORKER.search(name):
            raise InvalidRequest(path, f"{shown(name)} is not known; processors are selected by {ANNOTATION}{{json}}")
    return entries


def allowed_token_ids(path: str, value: Any) -> list[int]:
    """Distinct token ids in ascending order."""
    return sorted(integers(MAX_LIST)(path, value))


def token_sequences(path: str, value: Any) -> list[list[int]]:
    """A list of token id sequences; a bare id is a sequence of one."""
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(path, f"must be a list of lists of token ids, got {shown(value)}")
    sequences = [list(item) if isinstance(item, (list, tuple)) else [item] for item in value]
    if any(type(token_id) is not int for ids in sequences for token_id in ids):
        raise InvalidRequest(path, "must be a list of lists of token ids")
    return sequences


_STRICT_JSON = decoder()
_GUIDES = ("json", "regex", "choice", "grammar", "structural_tag")
_GUIDE_OPTIONS = ("backend", "whitespace_pattern")

GUIDE_BACKENDS = ("auto", "guidance", "llguidance")
"""Names of the library that compiles guides."""

OTHER_BACKEND = "this worker decodes grammars with llguidance"
"""Refusal of another one."""


def guided_decoding(path: str, value: Any) -> GuidedDecodingParams | None:
    """The guide that the answer must match: one kind, or none; checked further when compiled."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"must be a mapping, got {shown(value)}")
    given = {name: each for name, each in value.items() if each is not None}
    for name in given:
        if name not in _GUIDES + _GUIDE_OPTIONS:
            raise InvalidRequest(f"{path}.{shown(name).strip(chr(39))}", "unknown field")
    if not given:
        return None
    if given.pop("backend", "auto") not in GUIDE_BACKENDS:
        raise InvalidRequest(f"{path}.backend", OTHER_BACKEND)
    if given.pop("whitespace_pattern", None) is not None:
        raise InvalidRequest(f"{path}.whitespace_pattern", f"is not supported; give a guide: {', '.join(_GUIDES)}")
    if len(given) != 1:
        raise InvalidRequest(path, f"must have exactly one of {', '.join(_GUIDES)}, got {', '.join(given) or 'none'}")
    if isinstance(given.get("json"), str):
        given["json"] = _json(f"{path}.json", given["json"], "a JSON Schema")
    if "structural_tag" in given:
        tag = given["structural_tag"]
        tag = _json(f"{path}.structural_tag", tag, "JSON") if isinstance(tag, str) else tag
        given["structural_tag"] = format_of(tag)
    return GuidedDecodingParams(**given)


def _json(path: str, text_: str, what: str) -> Any:
    if len(text_) > MAX_BYTES:
        raise InvalidRequest(path, f"must have at most {MAX_BYTES} characters, got {len(text_)}")
    try:
        return _STRICT_JSON.decode(text_)
    except Ambiguous as error:
        raise InvalidRequest(path, f"must be {what} that can be read in one way: {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(path, f"must be {what}") from None


def prompt_ids(path: str, value: Any) -> list[int]:
    """The prompt: a list of ids, or packed as little-endian int32 (``DYN_TOKEN_IDS_AS_BYTES``)."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _unpacked(path, bytes(value))
    if not isinstance(value, (list, tuple)) or any(type(item) is not int for item in value):
        raise InvalidRequest(path, f"must be a list of token ids, got {shown(value)}")
    return list(value)


def _unpacked(path: str, packed: bytes) -> list[int]:
    if len(packed) % 4:
        raise InvalidRequest(path, f"packed token ids must be a multiple of 4 bytes, got {len(packed)}")
    ids = array.array("i" if array.array("i").itemsize == 4 else "l", packed)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tolist()


def logprobs_mode(path: str, value: Any) -> str:
    if value not in LOGPROBS_MODES:
        raise InvalidRequest(path, f"must be one of {', '.join(LOGPROBS_MODES)}, got {shown(value)}")
    return str(value)


_PARSERS: dict[str, Parser] = {
    "logprobs_mode": logprobs_mode,
    "ignore_eos": boolean,
    "allowed_token_ids": allowed_token_ids,
    "bad_words_token_ids": token_sequences,
    "guided_decoding": guided_decoding,
}
"""Parsers of the controls that are no numbers."""


def control_parser(control: Control) -> Parser:
    """The parser of the values of a control that clients may send."""
    return _PARSERS.get(control.name) or within_bounds(control)


def control_rows(record: type[SamplingParams]) -> list[Field]:
    """The rows of the controls that a request may set."""
    return [
        _honoured(path, control_parser(control), control.summary, control.name)
        for control in sampling_controls(record)
        for path in control.paths
    ]


def _honoured(path: str, parse: Parser, why: str, target: str | None = None) -> Field:
    return Field(path, "honoured", why, parse, target or path.rpartition(".")[2])


def _text_switch(name: str) -> Field:
    return Field(f"output_options.{name}", "frontend", "The frontend makes the text.", boolean)


def _no_effect(path: str, why: str) -> Field:
    return Field(path, "no effect", why)


def _refused(path: str, why: str, *neutral: Any) -> Field:
    return Field(path, "refused", why, neutral=(False, *neutral))


_ROUTER = "for the router, which has acted on it"
_PREPARED = "pictures are read and prepared as the model's own files say"
_MEDIA_HASHES = "Hashes of the pictures, for the router."
_RENDERED = "The chat again, for workers that make prompts of it; the pictures are in multi_modal_data."
_BOOTSTRAP = "KV transfer of this kind is not supported: prefill answers before decode begins"


_OTHER_FIELDS: tuple[Field, ...] = (
    _honoured("token_ids", prompt_ids, "The prompt.", "prompt_token_ids"),
    _honoured("model", text, "Name that the client asked for."),
    _honoured(
        "stop_conditions.stop",
        stop_strings,
        "Stop strings: the answer ends with the token that completes one, and the frontend cuts its text. "
        "With `--migration on` tokens that may begin one are sent together.",
        "stop_strings",
    ),
    _honoured(
        "stop_conditions.stop_token_ids",
        integers(MAX_STOP_TOKEN_IDS),
        "End the answer; shown only with include_stop_str_in_output.",
    ),
    _honoured("stop_conditions.stop_token_ids_visible", integers(MAX_STOP_TOKEN_IDS), "End the answer and are shown."),
    _honoured(
        "stop_conditions.stop_token_ids_hidden", integers(MAX_STOP_TOKEN_IDS), "End the answer and are not shown."
    ),
    _refused(
        "sampling_options.n",
        "more than one choice cannot be streamed: Dynamo's unified backend ends the stream "
        "with the first choice that finishes; send one request per choice",
        1,
    ),
    _refused(
        "sampling_options.best_of", "best_of above 1 is not supported; it needs several choices per request", 0, 1
    ),
    _refused("sampling_options.use_beam_search", "beam search is not supported"),
    _refused("sampling_options.length_penalty", "belongs to beam search, which is not supported", 1),
    _honoured(
        "sampling_options.include_stop_str_in_output",
        boolean,
        "Shows stop_token_ids; the frontend does the same for stop strings.",
        "include_stop",
    ),
    _no_effect("sampling_options.detokenize", "This worker sends token ids; the frontend makes the text."),
    _honoured(
        "output_options.return_token_ids",
        boolean,
        "engine_data has the ids of the prompt, and of the answer with the end token that it does not show.",
        "returns_token_ids",
    ),
    _text_switch("skip_special_tokens"),
    _text_switch("return_tokens_as_token_ids"),
    _text_switch("no_stop_trim"),
    _no_effect("output_options.formatted_prompt", "The frontend reports the prompt that it made."),
    _honoured(
        "eos_token_ids",
        integers(MAX_STOP_TOKEN_IDS),
        "The model's end tokens; hidden stop tokens unless ignore_eos.",
    ),
    _honoured(
        "annotations",
        client_annotations,
        "`logits_processors:{json}` selects processors (docs/processors.md); `return_token_ids` and "
        "`logprobs_mode:MODE` are the fields of output_options. Another one whose name (the part before "
        "a colon) has `logits` or `processor` in it is refused as a mistake. The rest are the client's own or the "
        "frontend's (formatted_prompt, token_ids, llm_metrics, request_id, query_instance_id) and have no effect here.",
    ),
    _honoured("continues", continuation, CONTINUES),
    _honoured("_HEALTH_CHECK", boolean, "Marks the runtime's health probe, which runs like any request.", "is_probe"),
    _no_effect("mdc_sum", "Checksum of the model card."),
    _no_effect("request_timestamp_ms", "Timing of the frontend."),
    _no_effect("migration_link", "Trace of the worker that served the request before."),
    _no_effect("migration_state", "State of the frontend's migration."),
    _no_effect("jail_seed", "State of the frontend's stop strings after a migration."),
    _honoured(
        "agent_context",
        session_id,
        "Identity of the client's session: its `session_id` is the conversation that TensorRT-LLM keeps on one "
        "attention data parallel rank, where it is told to.",
        "session_id",
    ),
    _no_effect("router", "Parameters of the router."),
    _no_effect("router_config_override", _ROUTER),
    _no_effect("kv_hint", "A hint about reuse of KV blocks; it changes no token."),
    _honoured("require_reasoning", boolean, "A grammar starts after the thinking, if the model has thinking tags."),
    _no_effect("image_cache_scope", "Scope of loaded pictures that Dynamo's own workers keep; this worker keeps none."),
    _no_effect("routing.backend_instance_id", _ROUTER),
    _no_effect("routing.prefill_worker_id", _ROUTER),
    _no_effect("routing.decode_worker_id", _ROUTER),
    _honoured(
        "routing.dp_rank",
        rank,
        "Rank of TensorRT-LLM's attention data parallelism that the router chose; other engines have one rank.",
    ),
    _no_effect("routing.prefill_dp_rank", _ROUTER),
    _no_effect("routing.expected_output_tokens", _ROUTER),
    _honoured(
        "routing.lora_name",
        text,
        "LoRA adapter of `--lora-modules` that the client chose as its model; others are refused by name.",
    ),
    _honoured("routing.cache_salt", text, "Requests share the KV of common beginnings only if their salt is the same."),
    _no_effect("routing.priority_jump", _ROUTER),
    _no_effect("routing.strict_priority", _ROUTER),
    _honoured(
        "routing.priority",
        priority,
        "A hint about order, for the router and the waiting queues of TensorRT-LLM and vLLM; the embedded "
        "engine serves clients in turn.",
    ),
    _no_effect("routing.allowed_worker_ids", _ROUTER),
    _no_effect("routing.routing_constraints", _ROUTER),
    _no_effect("extra_args.nvext.cache_salt", "As routing.cache_salt, where the frontend puts it too."),
    _no_effect("extra_args.nvext.extra_fields", "The frontend adds these fields to the response."),
    _no_effect("extra_args.nvext.token_in", "Says that the client sent token ids; they are in token_ids."),
    _no_effect(
        "extra_args.reasoning_parser_kwargs",
        "The chat template's arguments again, for a parser of thoughts; the worker reads the prompt.",
    ),
    _no_effect(
        "extra_args.reasoning_ended",
        "Whether the prompt's thinking has ended, for a parser of thoughts; the worker reads the prompt.",
    ),
    _no_effect("extra_args.sampling_options.detokenize", "This worker sends token ids; the frontend makes the text."),
    _no_effect("extra_args.formatted_prompt", _RENDERED),
    _no_effect("extra_args.messages", _RENDERED),
    _no_effect("extra_args.mm_hashes", _MEDIA_HASHES),
    _no_effect("extra_args.mm_hashes_by_modality", _MEDIA_HASHES),
    _honoured(
        IMAGES,
        read_images,
        'Pictures, `{"image_url": [{"Url": ...}]}`, each in the place of one token of the prompt: with '
        "`--modality multimodal`, on vLLM and TensorRT-LLM (docs/vllm.md, docs/tensorrt-llm.md); other media are "
        "refused.",
        "images",
    ),
    _no_effect("mm_routing_info", "The prompt as it is with its pictures, for the router."),
    _refused("multi_modal_uuids", "pictures are given by their URLs"),
    _refused("mm_processor_kwargs", _PREPARED),
    _refused("media_io_kwargs", _PREPARED),
    _refused("encoder_result", "there is no encode worker: a worker computes pictures itself"),
    _refused("prompt_embeds", "prompts are token ids here, not embeddings"),
    _refused("generate_request", "the engine-native generate API is not supported"),
    _honoured(
        "prefill_result", prefill_result, "On a decode worker: where the prompt's KV is (docs/disaggregation.md)."
    ),
    _refused("bootstrap_info", _BOOTSTRAP),
    _refused("staged_kv_cleanup", _BOOTSTRAP),
)
"""The fields that are no controls of `SamplingParams`."""

_SECTIONS = tuple(dict.fromkeys(row.section for row in _OTHER_FIELDS))


def request_fields(record: type[SamplingParams] = SamplingParams) -> tuple[Field, ...]:
    """Every field of a request whose controls are those of ``record``, section by section."""
    return tuple(sorted((*control_rows(record), *_OTHER_FIELDS), key=lambda row: _SECTIONS.index(row.section)))


def sections_of(fields: tuple[Field, ...]) -> frozenset[str]:
    """Paths whose value is a mapping of further fields."""
    return frozenset(
        ".".join(row.path.split(".")[:depth]) for row in fields for depth in range(1, row.path.count(".") + 1)
    )


FIELDS = request_fields()
"""The fields of the requests that are served."""

SECTIONS = sections_of(FIELDS)
