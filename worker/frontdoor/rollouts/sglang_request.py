"""SGLang's ``/generate``: its fields → one completion per prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.catalog import MAX_CHOICES
from adapters.strict_json import decoder
from worker.frontdoor.chat_prompt import check_ids
from worker.frontdoor.completions.asked import MAX_PROMPTS
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.returned_tokens import Body
from worker.frontdoor.rollouts.tables import TEXT_ONLY, check_names, integer
from worker.frontdoor.values import object_of, printable, shown, truth
from worker.sampling import MAX_LOGPROBS

DEFAULTS: Body = {
    "max_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Fields of a completion that SGLang gives a value if its client gives none, or null; but null as
``max_new_tokens`` is no bound.
"""

_BOUND = "max_new_tokens"

SAMPLING: Mapping[str, str] = {
    _BOUND: "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "no_stop_trim": "include_stop_str_in_output",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias", "n"),
        )
    },
}
"""Keys of ``sampling_params`` → fields of a completion."""

_SAMPLING_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "structural_tag": ("is not supported here; name the processor structural_tag in logits_processors", ()),
    "custom_params": ("are for custom processors of SGLang; name processors in logits_processors", ({},)),
    "spaces_between_special_tokens": ("must be true or false, which changes no text here", (True, False)),
    "stream_interval": ("is not supported", (1,)),
    "stop_regex": ("is not supported", ([],)),
}

HONOURED: Mapping[str, str] = {
    "text": "prompt",
    "input_ids": "prompt",
    "sampling_params": "",
    "rid": "",
    "return_logprob": "",
    "logprob_start_len": "",
    "top_logprobs_num": "",
    "return_text_in_logprobs": "",
    "stream": "",
    "lora_path": "model",
    "model": "model",
    "extra_key": "cache_salt",
    "logits_processors": "logits_processors",
}
"""Fields that are read; those that become one of a completion, with its name."""

_PER_PROMPT = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")
"""Fields that of a batch may be a list, with an entry for each prompt."""

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **{name: (TEXT_ONLY, ([],)) for name in ("image_data", "video_data", "audio_data", "modalities")},
    "input_embeds": ("prompts are text or token ids here", ([],)),
    "token_ids_logprob": ("log probabilities of given tokens are not reported; use top_logprobs_num", ([],)),
    "return_hidden_states": ("hidden states are not reported", (False,)),
    "return_routed_experts": ("routing of experts is not reported", (False,)),
    "custom_logit_processor": ("SGLang's code is not run here; name processors in logits_processors", ("",)),
    "session_params": ("there are no sessions", ({},)),
    "priority": ("clients take turns here", (0,)),
    "require_reasoning": ("is not supported", (False,)),
    "log_metrics": ("requests are always counted", (True,)),
    "no_logs": ("is not supported", (False,)),
    "custom_labels": ("are not supported", ({},)),
    "background": ("is not supported; use batches", (False,)),
    "conversation_id": ("there are no conversations", ("",)),
    **{
        name: ("prefill and decode are the router's choice here", ([],))
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank")
    },
}

_STRICT_JSON = decoder()

NAMES = {
    **{ours: f"sampling_params.{theirs}" for theirs, ours in SAMPLING.items()},
    "cache_salt": "extra_key",
    "logprobs_mode": "return_logprob",
    "prompt_logprobs": "logprob_start_len",
}
"""Names at the endpoint for the fields of a completion."""


@dataclass(frozen=True, slots=True)
class SglangRequest:
    """One prompt of a request.

    Attributes:
        completion: The completion, without its model.
        names: Names at the endpoint for the fields of it.
        rid: Id for ``meta_info``, None for one that is made.
        num_choices: Answers to it.
        top: Alternatives per token, None for no log probabilities.
        scores_from: Index of the first token of the prompt whose log probability is reported, -1
            for none.
    """

    completion: Body
    names: Mapping[str, str]
    rid: str | None
    num_choices: int
    top: int | None
    scores_from: int


@dataclass(frozen=True, slots=True)
class SglangBatch:
    """A request.

    Attributes:
        requests: Requests for each prompt.
        is_batch: Whether the answer is a list.
        streams: Whether it is a stream of events.
        has_texts: Whether log probabilities have the texts of tokens.
        model: Value of ``model`` or ``lora_path``.
    """

    requests: list[SglangRequest]
    is_batch: bool
    streams: bool
    has_texts: bool
    model: Any


def read(fields: Body) -> SglangBatch:
    """The request. Raises `FieldRefused`, with SGLang's name of the field."""
    check_names(fields, HONOURED, REFUSED, "")
    place, prompts, is_batch = _prompts(fields)
    if fields.get("model") is not None and fields.get("lora_path") is not None:
        raise FieldRefused("lora_path", "cannot be given beside model; an adapter is a model here")
    several = is_batch or _samples(fields)
    for name in _PER_PROMPT if is_batch else ():
        value = fields.get(name)
        if isinstance(value, list) and len(value) != len(prompts):
            raise FieldRefused(name, f"must have an entry for each of {len(prompts)} prompts, got {len(value)}")
    requests = [_one(fields, place, prompt, index if is_batch else None) for index, prompt in enumerate(prompts)]
    return SglangBatch(
        requests=requests,
        is_batch=several,
        streams=truth("stream", fields.get("stream")),
        has_texts=truth("return_text_in_logprobs", fields.get("return_text_in_logprobs")),
        model=fields.get("model") if fields.get("lora_path") is None else fields["lora_path"],
    )


def _samples(fields: Body) -> bool:
    """Whether a lone prompt has several answers."""
    params = fields.get("sampling_params")
    return isinstance(params, dict) and type(params.get("n")) is int and params["n"] > 1


def _prompts(fields: Body) -> tuple[str, list[Any], bool]:
    """Name of the field with the prompt, the prompts, and whether they are a list."""
    given = [name for name in ("text", "input_ids") if fields.get(name) is not None]
    if len(given) != 1:
        raise FieldRefused("input_ids", f"must be given, or text, and not both; got {' and '.join(given) or 'neither'}")
    (name,) = given
    value = fields[name]
    if name == "text":
        is_batch = isinstance(value, list)
    else:
        is_batch = isinstance(value, list) and bool(value) and all(isinstance(one, list) for one in value)
    prompts = value if is_batch else [value]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise FieldRefused(name, f"must be 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    for index, prompt in enumerate(prompts):
        path = f"{name}[{index}]" if is_batch else name
        if name == "input_ids":
            check_ids(path, prompt)
        elif not isinstance(prompt, str) or not prompt:
            raise FieldRefused(path, "must be a text that is not empty")
    return name, prompts, is_batch


def _one(fields: Body, place: str, prompt: Any, index: int | None) -> SglangRequest:
    """The request for a prompt; `index`: its place in a batch, whose fields may be lists."""
    own = dict(fields)
    for name in _PER_PROMPT if index is not None else ():
        if isinstance(own.get(name), list):
            own[name] = own[name][index]
    params = object_of("sampling_params", {} if own.get("sampling_params") is None else own["sampling_params"])
    check_names(params, SAMPLING, _SAMPLING_REFUSED, "sampling_params.")
    given = {SAMPLING[name]: value for name, value in params.items() if value is not None and name in SAMPLING}
    completion = {**DEFAULTS, **given, "prompt": prompt}
    if _BOUND in params and params[_BOUND] is None:
        del completion["max_tokens"]
    _adapt(completion)
    for name in ("extra_key", "logits_processors"):
        if own.get(name) is not None:
            completion[HONOURED[name]] = own[name]
    wants = truth("return_logprob", own.get("return_logprob"))
    start = integer(own, "logprob_start_len", -1, 2**31, -1)
    top = integer(own, "top_logprobs_num", 0, MAX_LOGPROBS, 0)
    if top and (completion["temperature"] not in (0, 1) or _names_other_temperature(own.get("logits_processors"))):
        raise FieldRefused("top_logprobs_num", "alternatives are reported at the temperatures 0 and 1 alone")
    if own.get("rid") is not None and not isinstance(own["rid"], str):
        raise FieldRefused("rid", "must be a text, or of a batch a list of texts")
    if wants and start >= 0:
        completion["prompt_logprobs"] = top
    return SglangRequest(
        completion=completion,
        names={**NAMES, "prompt": place if index is None else f"{place}[{index}]"},
        rid=own.get("rid"),
        num_choices=completion.get("n", 1),
        top=top if wants else None,
        scores_from=start if wants else -1,
    )


def _names_other_temperature(selected: Any) -> bool:
    """Whether a value of ``logits_processors``, which is checked later, names another temperature
    than 0 and 1.
    """
    named = selected.get("processors") if isinstance(selected, dict) else selected
    for one in named if isinstance(named, list) else []:
        if isinstance(one, dict) and one.get("name") == "temperature":
            args = one.get("args")
            if not isinstance(args, dict) or args.get("value") not in (0, 1):
                return True
    return False


def _adapt(completion: Body) -> None:
    """Check and convert what a completion has in another form."""
    count, tokens = completion.get("n", 1), completion.get("max_tokens", 0)
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise FieldRefused("sampling_params.n", f"must be an integer from 1 to {MAX_CHOICES}")
    if type(tokens) is not int or tokens < 0:
        problem = f"must be an integer of at least 0, got {shown(tokens)}"
        raise FieldRefused(f"sampling_params.{_BOUND}", problem)
    temperature = completion["temperature"]
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise FieldRefused("sampling_params.temperature", f"must be a number, got {shown(temperature)}")
    if isinstance(completion.get("guided_json"), str):
        try:
            completion["guided_json"] = _STRICT_JSON.decode(completion["guided_json"])
        except (ValueError, RecursionError) as error:
            problem = f"must be a text with a JSON Schema: {printable(str(error))}"
            raise FieldRefused("sampling_params.json_schema", problem) from None
    if completion.get("stop") in ([], ""):
        del completion["stop"]
