"""vLLM's ``/inference/v1/generate``: its fields → a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.chat_prompt import check_ids
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import stream_options
from worker.frontdoor.returned_tokens import Body
from worker.frontdoor.rollouts.sglang_request import DEFAULTS as SGLANG_DEFAULTS
from worker.frontdoor.rollouts.tables import TEXT_ONLY, check_names
from worker.frontdoor.values import integer, object_of, object_within, shown, truth
from worker.sampling import MAX_LOGPROBS

DEFAULTS: Body = {name: value for name, value in SGLANG_DEFAULTS.items() if name != "max_tokens"}
"""Fields of a completion that vLLM's ``SamplingParams`` gives a value if a client gives none; its
server leaves ``max_tokens`` to the context.
"""

_GUIDES = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}

SAMPLING = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "logit_bias", "allowed_token_ids"),
    *("bad_words_token_ids", "thinking_token_budget"),
)
"""Keys of ``sampling_params`` that are read; all but the guides have a completion's names."""

_SAMPLING_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "detokenize": ("is told by output_mode", (True, False)),
    "output_kind": ("streams are of deltas", (0, 1, 2)),
    "spaces_between_special_tokens": ("false is not supported", (True,)),
    "flat_logprobs": ("is not supported", (False,)),
    "bad_words": ("are texts; use bad_words_token_ids", ([],)),
    "logprob_token_ids": ("log probabilities of given tokens are not reported", ([],)),
    "prompt_logprob_start": ("is not supported", (0,)),
    "stream_interval": ("is not supported", (1,)),
    "extra_args": ("are not supported", ({},)),
    "best_of": ("answers are not compared with each other", (1,)),
    "watermarking": ("is not supported", (False,)),
}

HONOURED = (
    *("request_id", "token_ids", "sampling_params", "model", "stream", "stream_options", "cache_salt"),
    *("return_token_ids", "output_mode", "logits_processors"),
)

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "features": (TEXT_ONLY, ({},)),
    "content_parts": (TEXT_ONLY, ([],)),
    "token_offsets": ("have no effect on an answer, and are not taken", ([],)),
    "reasoning_ended": ("is not supported", ()),
    "reasoning_parser_kwargs": ("is not supported", ({},)),
    "priority": ("clients take turns here", (0,)),
    "kv_transfer_params": ("prefill and decode are the router's choice here", ({},)),
    "ec_transfer_params": (TEXT_ONLY, ({},)),
}

NAMES = {
    "prompt": "token_ids",
    **{ours: f"sampling_params.structured_outputs.{theirs}" for theirs, ours in _GUIDES.items()},
    **{name: f"sampling_params.{name}" for name in SAMPLING},
    "logprobs_mode": "sampling_params.logprobs",
}
"""Names at the endpoint for the fields of a completion."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request.

    Attributes:
        completion: The completion, without its model.
        model: Value of ``model``.
        request_id: Id of the answer, None for one that is made.
        top: Alternatives per token, None for no log probabilities.
        num_scores: Alternatives per token of the prompt, None for none.
        has_text: Whether choices have their text.
        has_prompt: Whether the answer has the prompt's ids.
        streams: Whether it is a stream of events.
        has_usage: Whether that ends with the usage.
    """

    completion: Body
    model: Any
    request_id: str | None
    top: int | None
    num_scores: int | None
    has_text: bool
    has_prompt: bool
    streams: bool
    has_usage: bool


def read(fields: Body) -> InferenceRequest:
    """The request. Raises `FieldRefused`, with vLLM's name of the field."""
    check_names(fields, dict.fromkeys(HONOURED), REFUSED, "")
    check_ids("token_ids", fields.get("token_ids"))
    params = object_of("sampling_params", fields.get("sampling_params"))
    check_names(params, dict.fromkeys(SAMPLING), _SAMPLING_REFUSED, "sampling_params.")
    top, scores = (_count(params, name) for name in ("logprobs", "prompt_logprobs"))
    given = {name: value for name, value in params.items() if name in SAMPLING and value is not None}
    guide = given.pop("structured_outputs", None)
    given.pop("logprobs", None)
    completion = {**DEFAULTS, **given, **_guide(guide), "prompt": fields["token_ids"]}
    for name in ("cache_salt", "logits_processors"):
        if fields.get(name) is not None:
            completion[name] = fields[name]
    if completion.get("stop") in ([], ""):
        del completion["stop"]
    mode = fields.get("output_mode", "tokens")
    if mode not in ("tokens", "text"):
        raise FieldRefused("output_mode", f"must be tokens or text, got {shown(mode)}")
    if mode == "text" and top is not None:
        raise FieldRefused("sampling_params.logprobs", "have ids, which output_mode text does not; use tokens")
    streams, options = truth("stream", fields.get("stream")), fields.get("stream_options")
    if options is not None:
        if not streams:
            raise FieldRefused("stream_options", "needs stream: true")
        stream_options(options, fields)
    if streams and scores is not None:
        raise FieldRefused("sampling_params.prompt_logprobs", "are not part of a stream")
    request_id = fields.get("request_id")
    if request_id is not None and not isinstance(request_id, str):
        raise FieldRefused("request_id", "must be a text")
    return InferenceRequest(
        completion=completion,
        model=fields.get("model"),
        request_id=request_id,
        top=top,
        num_scores=scores,
        has_text=mode == "text",
        has_prompt=truth("return_token_ids", fields.get("return_token_ids")),
        streams=streams,
        has_usage=bool((options or {}).get("include_usage")),
    )


def _count(params: Body, name: str) -> int | None:
    value = params.get(name)
    return None if value is None else integer(f"sampling_params.{name}", value, 0, MAX_LOGPROBS)


def _guide(given: Any) -> Body:
    """The guide of ``structured_outputs`` as a field of a completion."""
    path = "sampling_params.structured_outputs"
    if given is None:
        return {}
    object_within(path, given, (*_GUIDES, "json_object", "structural_tag"))
    is_json = truth(f"{path}.json_object", given.get("json_object"))
    wanted = {name: value for name, value in given.items() if value is not None and (name != "json_object" or is_json)}
    if "structural_tag" in wanted:
        raise FieldRefused(f"{path}.structural_tag", "is not supported here; name the processor in logits_processors")
    if len(wanted) != 1:
        raise FieldRefused(path, f"must have one of {', '.join(_GUIDES)} and json_object, got {len(wanted)}")
    ((name, value),) = wanted.items()
    return {"guided_json": {"type": "object"}} if name == "json_object" else {_GUIDES[name]: value}
