"""A ``GenerateRequest`` and its gRPC metadata → the message that `worker.runtimes.direct` serves.

Every field is honoured, or refused by its name. `FIELDS` has the field of docs/request.md that each
one becomes; that is parsed and bounded where the request is served, and an error about it is told
by the protocol's name (`renamed`).
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from google.protobuf.unknown_fields import UnknownFieldSet

from adapters.strict_json import decoder
from worker.errors import InvalidRequest, path_within, shown
from worker.requests.client import METADATA_KEY
from worker.requests.fields import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import UnknownModel, Unsupported, WrongRole
from worker.runtimes.openengine.media import pictures, told_media

MAX_ID_CHARACTERS = 256

CLIENT_METADATA = f"x-dynamo-meta-{METADATA_KEY}"
"""Metadata of a call with the label of the client that the engine's turns are shared among."""

MAX_INTEGER = 2**53 - 1
"""Largest integer that a number of a ``Struct``, which is a double, can only be itself."""

FIELDS: dict[str, str] = {
    "model": "model",
    "prompt": "prompt",
    "token_ids.ids": "token_ids",
    "lora_name": "routing.lora_name",
    "sampling.temperature": "sampling_options.temperature",
    "sampling.top_p": "sampling_options.top_p",
    "sampling.top_k": "sampling_options.top_k",
    "sampling.min_p": "sampling_options.min_p",
    "sampling.frequency_penalty": "sampling_options.frequency_penalty",
    "sampling.presence_penalty": "sampling_options.presence_penalty",
    "sampling.repetition_penalty": "sampling_options.repetition_penalty",
    "sampling.seed": "sampling_options.seed",
    "sampling.num_sequences": "sampling_options.n",
    "stopping.max_tokens": "stop_conditions.max_tokens",
    "stopping.min_tokens": "stop_conditions.min_tokens",
    "stopping.ignore_eos": "stop_conditions.ignore_eos",
    "stopping.include_stop_in_output": "sampling_options.include_stop_str_in_output",
    "response.output_candidates": "output_options.logprobs",
    "response.prompt_candidates": "output_options.prompt_logprobs",
    "kv.cache_salt": "routing.cache_salt",
    "media": "multi_modal_data",
    "guided.json_schema": "sampling_options.guided_decoding.json",
    "guided.regex": "sampling_options.guided_decoding.regex",
    "guided.ebnf_grammar": "sampling_options.guided_decoding.grammar",
    "guided.structural_tag": "sampling_options.guided_decoding.structural_tag",
    "guided.choice": "sampling_options.guided_decoding.choice",
    "guided.backend": "sampling_options.guided_decoding.backend",
    "extra.allowed_token_ids": "sampling_options.allowed_token_ids",
    "extra.annotations": "annotations",
    "extra.bad_words_token_ids": "sampling_options.bad_words_token_ids",
    "extra.continues": "continues",
    "extra.detokenize": "text",
    "extra.logits_processors": "logits_processors",
    "extra.max_thinking_tokens": "stop_conditions.max_thinking_tokens",
    "extra.require_reasoning": "require_reasoning",
    "extra.skip_special_tokens": "output_options.skip_special_tokens",
}
"""Fields of the protocol that become one of docs/request.md."""

TOLD: tuple[tuple[str, str], ...] = (
    *((ours, theirs) for theirs, ours in FIELDS.items()),
    ("stop_conditions.stop", "stopping.conditions.stop_text"),
    ("stop_conditions.stop_token_ids", "stopping.conditions.stop_token_id"),
    ("sampling_options.guided_decoding", "guided"),
    ("prompt_token_ids", "token_ids.ids"),
    ("routing.priority", "openengine-priority"),
    (f"metadata.{METADATA_KEY}", CLIENT_METADATA),
    ("request id", "request_id"),
)
"""Names in errors of the worker, and the protocol's."""

_PARAMS = "sampling_params."
"""Begins the names that engines have for controls."""

_TOLD_PARAMS = {
    **{ours.rpartition(".")[2]: theirs for ours, theirs in TOLD},
    "best_of": "sampling.num_sequences",
    "embedding_bias": "extra.logits_processors",
    "logits_processor": "extra.logits_processors",
    "logprobs_mode": "extra.annotations",
}
"""Names of controls behind `_PARAMS`, and the protocol's."""

_GUIDE_ARGUMENTS = "sampling_options.guided_decoding.args."

_COPIED = tuple(path for path in FIELDS if path.startswith(("sampling.", "stopping.", "kv.")))
"""Optional scalars whose values are copied."""

_EXTRAS = tuple(path.removeprefix("extra.") for path in FIELDS if path.startswith("extra."))


@dataclass(frozen=True, slots=True)
class CallHints:
    """Metadata of a call that is no part of its message.

    Attributes:
        priority: Urgency beside other requests; more is sooner.
        trace: Headers of the W3C trace context.
        client: Metadata of the request for the server, which have the label of its client.
    """

    priority: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)
    client: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read.

    Attributes:
        message: The message for `worker.runtimes.direct`.
        prompt_scores_from: Index of the first token of the prompt whose log probability is wanted,
            None if none is.
        num_prompt_candidates: Candidates wanted per token of the prompt.
    """

    message: dict[str, Any]
    prompt_scores_from: int | None
    num_prompt_candidates: int


def read(request: wire.GenerateRequest, names: Iterable[str], hints: CallHints) -> Asked:
    """The request, read.

    Args:
        request: The request.
        names: Names of the model that this worker serves.
        hints: Metadata of the call.

    Raises:
        InvalidRequest: a field is unknown, malformed, or asks for what this worker does not have;
            the others are checked where the request is served.
    """
    _check_number(request.stopping)
    _refuse_unknown(request, "")
    _check_identity(request, names)
    message: dict[str, Any] = {}
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", "must be prompt or token_ids, got neither")
    message[kind] = request.prompt if kind == "prompt" else list(request.token_ids.ids)
    for path in _COPIED:
        section, _, name = path.partition(".")
        options = getattr(request, section)
        if options.HasField(name):
            _put(message, FIELDS[path], getattr(options, name))
    _read_conditions(request.stopping, message)
    _put(message, FIELDS["media"], pictures(request.media))
    _read_kv(request.kv, message)
    _read_guide(request.guided, message)
    _read_extra(request.extra, message)
    scores = request.response
    prompt = _candidates(scores, "prompt")
    _put(message, FIELDS["response.output_candidates"], _candidates(scores, "output"))
    _put(message, FIELDS["response.prompt_candidates"], prompt)
    if scores.HasField("prompt_logprob_start") and prompt is None:
        raise InvalidRequest("response.prompt_logprob_start", "needs return_prompt_logprobs")
    if request.lora_name:
        _put(message, FIELDS["lora_name"], request.lora_name)
    if hints.priority:
        _put(message, "routing.priority", hints.priority)
    first = None if prompt is None else scores.prompt_logprob_start
    return Asked(message, first, prompt or 0)


def renamed(error: InvalidRequest, request: wire.GenerateRequest) -> InvalidRequest:
    """An error of the worker about one of its own fields, told by the protocol's name."""
    if error.field.startswith(_GUIDE_ARGUMENTS):  # args.NAME of the processor that the guide runs as
        _, _, inner = error.field.removeprefix(_GUIDE_ARGUMENTS).partition(".")
        guide = f"guided.{request.guided.WhichOneof('guide')}"
        return InvalidRequest(f"{guide}.{inner}" if inner else guide, error.problem)
    if error.field == FIELDS["guided.regex"].rpartition(".")[0] and request.guided.WhichOneof("guide") is None:
        return InvalidRequest("extra.logits_processors", error.problem)  # the guide is a processor by its name
    if error.field.startswith(_PARAMS):
        name = re.split(r"[.\[]", error.field.removeprefix(_PARAMS), maxsplit=1)[0]
        told = _TOLD_PARAMS.get(name, _PARAMS + name)
        return InvalidRequest(told + error.field.removeprefix(_PARAMS + name), error.problem)
    field = error.field.removeprefix("extra_args.")  # Dynamo's other place of a control
    for ours, theirs in TOLD:
        rest = path_within(field, ours)
        if rest is not None and theirs == "media":
            return InvalidRequest(told_media(rest), error.problem)
        if rest is not None:
            inner = re.sub(r"^\.args\.\w+", "", rest)  # of the processor that the control runs as
            return InvalidRequest(theirs + inner, error.problem)
    return error


def read_hints(metadata: Iterable[tuple[str, str | bytes]], *, honours_priority: bool) -> CallHints:
    """The metadata of a call.

    Raises:
        InvalidRequest: a key of the protocol is unknown, repeated or malformed, or asks for what
            this worker does not have.
    """
    found: dict[str, str] = {}
    for key, value in metadata:
        if key in ("traceparent", "tracestate", CLIENT_METADATA) or key.startswith("openengine-"):
            if key in found:
                raise InvalidRequest(key, "must be given once")
            found[key] = value if isinstance(value, str) else value.decode(errors="replace")
    trace: dict[str, str] = {key: found.pop(key) for key in ("traceparent", "tracestate") if key in found}
    client = {METADATA_KEY: found.pop(CLIENT_METADATA)} if CLIENT_METADATA in found else {}
    found.pop("openengine-routing-key", None)  # a router has acted on it
    rank = _integer(found, "openengine-target-dp-rank", 0, 2**32 - 1)
    if rank:
        raise Unsupported("openengine-target-dp-rank", f"must be 0, this worker's only rank, got {rank}")
    priority = _integer(found, "openengine-priority", -(2**31), 2**31 - 1)
    if priority and not honours_priority:
        raise Unsupported("openengine-priority", "this engine serves its clients in turn (supports_priority is false)")
    for key in found:
        raise InvalidRequest(key, "unknown metadata of the protocol")
    return CallHints(priority, trace, client)


def _integer(found: dict[str, str], key: str, low: int, high: int) -> int:
    text = found.pop(key, "0")
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise InvalidRequest(key, f"must be an integer from {low} to {high}, got {shown(text)}")
    return int(text)


def _refuse_unknown(message: Message, path: str) -> None:
    """Refuse fields that this revision of the schema does not have: a client may rely on them."""
    for unknown in UnknownFieldSet(message):
        where = path.rstrip(".") or "request"
        raise Unsupported(where, f"field number {unknown.field_number} is not in the schema that this worker has")
    for one, value in message.ListFields():
        if one.message_type is None or one.message_type.file.package.startswith("google."):
            continue
        for each in (value,) if isinstance(value, Message) else value:
            _refuse_unknown(each, f"{path}{one.name}.")


def _check_number(options: wire.StoppingOptions) -> None:
    """Refuse more conditions than can be kept, before each of millions is looked at."""
    most = MAX_STOP_STRINGS + MAX_STOP_TOKEN_IDS
    if len(options.conditions) > most:
        raise InvalidRequest("stopping.conditions", f"must be at most {most}, got {len(options.conditions)}")


def _check_identity(request: wire.GenerateRequest, names: Iterable[str]) -> None:
    if len(request.request_id) > MAX_ID_CHARACTERS or not request.request_id.isprintable():
        raise InvalidRequest("request_id", f"must be at most {MAX_ID_CHARACTERS} printable characters")
    check_model(request.model, names)


def check_model(model: str, names: Iterable[str]) -> None:
    """Raises `UnknownModel` if it is none of `names`; an empty one is the model that is served."""
    if model and model not in names:
        raise UnknownModel("model", f"{shown(model)} is not served here")


def _put(message: dict[str, Any], path: str, value: Any) -> None:
    """Set a field of the message, if there is a value."""
    if value is None:
        return
    *sections, name = path.split(".")
    for section in sections:
        message = message.setdefault(section, {})
    message[name] = value


def _read_conditions(options: wire.StoppingOptions, message: dict[str, Any]) -> None:
    stops, token_ids = [], []
    for index, condition in enumerate(options.conditions):
        kind = condition.WhichOneof("condition")
        if kind is None or (kind == "stop_text" and not condition.stop_text):
            raise InvalidRequest(f"stopping.conditions[{index}]", "must have a stop_text that is not empty or a token")
        if kind == "stop_text":
            stops.append(condition.stop_text)
        else:
            token_ids.append(condition.stop_token_id)
    _put(message, "stop_conditions.stop", stops or None)
    _put(message, "stop_conditions.stop_token_ids", token_ids or None)


def _read_kv(options: wire.KvOptions, message: dict[str, Any]) -> None:
    if options.HasField("session"):
        raise WrongRole("kv.session", "this worker is aggregated: it computes prompts itself")
    if options.bypass_prefix_cache:  # nobody else has this salt
        _put(message, FIELDS["kv.cache_salt"], secrets.token_hex(16))


def _read_guide(guided: wire.GuidedDecoding, message: dict[str, Any]) -> None:
    kind = guided.WhichOneof("guide")
    if kind == "json_object":
        _put(message, FIELDS["guided.json_schema"], {"type": "object"})
    elif kind == "choice":
        _put(message, FIELDS["guided.choice"], list(guided.choice.choices))
    elif kind is not None:
        _put(message, FIELDS[f"guided.{kind}"], getattr(guided, kind))
    _put(message, FIELDS["guided.backend"], guided.backend or None)


def _candidates(options: wire.ResponseOptions, which: str) -> int | None:
    """Candidates per token, 0 for the token itself alone, None for no log probabilities."""
    wanted, selection = f"return_{which}_logprobs", getattr(options, f"{which}_candidates")
    kind = selection.WhichOneof("selection")
    if kind in ("token_ids", "all"):
        raise Unsupported(f"response.{which}_candidates.{kind}", "log probabilities are those of the top_n tokens")
    if options.HasField(wanted) and not getattr(options, wanted):
        if kind is not None:
            raise InvalidRequest(f"response.{which}_candidates", f"must not be given where {wanted} is false")
        return None
    if kind is None:
        return 0 if options.HasField(wanted) else None
    return int(selection.top_n)


def _read_extra(extra: Struct, message: dict[str, Any]) -> None:
    for key in extra.fields:
        if key not in _EXTRAS:
            raise Unsupported(f"extra.{shown(key).strip(chr(39))}", f"unknown; there are {', '.join(_EXTRAS)}")
    given = {key: _json(f"extra.{key}", value) for key, value in extra.fields.items()}
    chosen = given.get("logits_processors")
    if isinstance(chosen, str):
        given["logits_processors"] = _decoded("extra.logits_processors", chosen)
    for key, value in given.items():
        _put(message, FIELDS[f"extra.{key}"], value)


def _decoded(path: str, text: str) -> Any:
    try:
        return decoder().decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(path, f"must be JSON: {error}") from None


def _json(path: str, value: Value) -> Any:
    """The JSON data of a ``Value``; whole numbers as integers.

    Raises:
        InvalidRequest: a number is not finite, or so large that an integer may have lost digits.
    """
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {key: _json(f"{path}.{key}", one) for key, one in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_json(f"{path}[{index}]", one) for index, one in enumerate(value.list_value.values)]
    if kind != "number_value":
        return None if kind in ("null_value", None) else getattr(value, kind)
    number = value.number_value
    if not math.isfinite(number):
        raise InvalidRequest(path, f"must be a finite number, got {number}")
    if not number.is_integer():
        return number
    if abs(number) > MAX_INTEGER:
        problem = "a Struct's numbers are doubles, in which integers from 2^53 on lose digits; give "
        raise InvalidRequest(path, f"{problem}logits_processors as JSON text, got {number:g}")
    return int(number)
