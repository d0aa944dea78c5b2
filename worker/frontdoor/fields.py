"""Fields of chat and completion requests, OpenAI's and those that Dynamo adds, with their fate at
the front door and behind it.

*Honoured*: the answer follows it. *Frontend*: Dynamo's frontend acts on it. *No effect*: by nature;
it changes no token. *Refused*: a 400 that names it, unless its value asks for nothing.
`docs/request.md` has this table for clients, and a test compares the two. The rows of sampling
controls are made of what `SamplingParams` says beside its fields.

The fates behind the door were measured with the frontends of ai-dynamo 1.4.2 and 1.6.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from adapters.catalog import MAX_CHOICES
from worker.frontdoor import field_checks, field_types, structured_outputs
from worker.frontdoor.field_checks import GUIDES, Check
from worker.frontdoor.field_types import is_one_of
from worker.requests.fields import Fate
from worker.sampling import Control, SamplingParams, sampling_controls
from worker.sampling.control import cached

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ClientField:
    """One top-level field of a client's request.

    Attributes:
        name: Key in the body.
        paths: Endpoints that have it.
        fate: One of `Fate`.
        why: Effect of the field, or reason for the refusal; a row of `docs/request.md`.
        neutral: Values that, like null, ask for nothing: they are not refused, nor sent on.
        check: Refuses values.
        removed: Whether the front door takes it out of the request.
        control: Sampling control that Dynamo's frontend does not know; its processor is sent.
    """

    name: str
    paths: tuple[str, ...]
    fate: Fate
    why: str
    neutral: tuple[Any, ...] = ()
    check: Check | None = None
    removed: bool = False
    control: Control | None = None

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether ``value`` is as good as absent."""
        return is_one_of(value, self.neutral)


_BOTH = (CHAT, COMPLETIONS)
_ANSWERS_ARE_TEXT = "answers are text"
_OLD = "is deprecated; use tools and tool_choice"
_PREPARED = "pictures are read and prepared as the model's own files say"
_TEMPLATE = "For the chat template."
_ONE_GUIDE = "At most one guide per request."


def _row(name: str, paths: tuple[str, ...], fate: Fate, why: str, check: Check | None = None) -> ClientField:
    return ClientField(name, paths, fate, why, check=check)


def _switch(name: str, paths: tuple[str, ...], fate: Fate, why: str) -> ClientField:
    return ClientField(name, paths, fate, why, check=field_types.truth(name))


def _refused(name: str, paths: tuple[str, ...], why: str, *neutral: Any) -> ClientField:
    return ClientField(name, paths, "refused", why, neutral, removed=True)


_PROMPT_FIELDS: tuple[ClientField, ...] = (
    _row(
        "model",
        _BOTH,
        "frontend",
        "Which model answers; a name that is not served is a 404.",
        field_types.given_text("model"),
    ),
    _row(
        "messages",
        (CHAT,),
        "honoured",
        "The prompt, by the chat template. An assistant's message without content, as calls come back, has an empty "
        "text, and what the openai package parsed of it has no effect. The role developer is given to it as system. "
        "Parts are of type text or, in a message of the user, image_url, where the engine takes pictures "
        "(docs/vllm.md, docs/tensorrt-llm.md); others are refused.",
        field_checks.messages,
    ),
    _row(
        "prompt",
        _BOTH,
        "honoured",
        "The prompt: text, without special tokens that it does not have in it (no BOS), token ids, or a list of "
        "either, one choice each; of a chat token ids in place of messages.",
        field_checks.prompt,
    ),
)

_OTHER_FIELDS: tuple[ClientField, ...] = (
    _row(
        "max_completion_tokens",
        (CHAT,),
        "honoured",
        "As max_tokens, over which it wins.",
        field_types.count("max_completion_tokens", 1, 2**31 - 1),
    ),
    ClientField(
        "stop",
        _BOTH,
        "frontend",
        "Ends the answer. Refused: more than 4 with a frontend of 1.4.2, and beside ignore_eos.",
        neutral=([],),
        check=field_checks.stops("stop"),
    ),
    _row("stream", _BOTH, "frontend", "Server-sent events.", field_types.truth("stream")),
    _row(
        "stream_options",
        _BOTH,
        "frontend",
        "include_usage, continuous_usage_stats. Refused: include_obfuscation, and unknown keys.",
        field_checks.stream_options,
    ),
    ClientField("logit_bias", _BOTH, "honoured", "Becomes the processor logit_bias.", removed=True),
    ClientField(
        "logits_processors",
        _BOTH,
        "honoured",
        "Not OpenAI's: a list of processors, or an object with them, receipt, deadline, order, speculation, prediction "
        "and choice (docs/processors.md).",
        removed=True,
    ),
    _row(
        "logprobs",
        _BOTH,
        "honoured",
        "Log probabilities of the answer, of a completion with echo of the prompt too, with up to 5 alternatives.",
        field_checks.logprobs,
    ),
    ClientField(
        "top_logprobs",
        (CHAT,),
        "honoured",
        "Alternatives per token, up to 20, or 100 before OpenEngine workers. Refused without logprobs: true.",
        neutral=(0,),  # with which the frontend gives no log probabilities at all
        check=field_checks.top_logprobs,
    ),
    _row(
        "response_format",
        (CHAT,),
        "honoured",
        "json_object, json_schema and structural_tag run as processors, whatever strict says. Beside a forced call "
        "JSON has no effect: its answer has no text. Refused: other types, unknown keys, structural_tag beside a "
        "forced call.",
        field_checks.response_format,
    ),
    _row(
        "tools",
        (CHAT,),
        "honoured",
        "For the prompt. With a format of calls, which is found from the model, every call is held to its schema; "
        "without one strict: true needs a forced call. Refused: custom tools.",
        field_checks.tools,
    ),
    _row(
        "tool_choice",
        (CHAT,),
        "honoured",
        "Runs as the processor tool_calls, a function as one call of it; without a format of calls a forced call runs "
        "as json_schema, and none only leaves out the tools. allowed_tools leaves out the others, with the mode auto "
        "or required. Refused: custom.",
        field_checks.tool_choice,
    ),
    _row(
        "parallel_tool_calls",
        (CHAT,),
        "honoured",
        "Without a format of calls false is refused, unless there are no tools, none may be called, or one is named.",
        field_types.truth("parallel_tool_calls"),
    ),
    _row("reasoning_effort", (CHAT,), "frontend", _TEMPLATE, field_types.given_text("reasoning_effort")),
    _row(
        "n",
        _BOTH,
        "honoured",
        f"Answers, 1 to {MAX_CHOICES}, each a request of its own to the workers.",
        field_checks.num_choices,
    ),
    _refused("best_of", (COMPLETIONS,), "answers are not compared with each other; n gives several", 1),
    ClientField(
        "echo",
        (COMPLETIONS,),
        "honoured",
        "The prompt comes first; max_tokens may be 0.",
        check=field_checks.echo,
        removed=True,
    ),
    _refused("suffix", (COMPLETIONS,), "text after the answer is not supported; Dynamo's frontend drops it", ""),
    _refused("modalities", (CHAT,), _ANSWERS_ARE_TEXT, [], ["text"]),
    _refused("audio", (CHAT,), _ANSWERS_ARE_TEXT, {}),
    ClientField(
        "web_search_options", (CHAT,), "refused", "there is no web search; Dynamo's frontend drops it", removed=True
    ),
    _refused("moderation", (CHAT,), "there is no moderation", {}),
    _refused("verbosity", (CHAT,), "is not supported"),
    _refused("functions", (CHAT,), _OLD, []),
    _refused("function_call", (CHAT,), _OLD, "none", "auto"),
    _refused("store", (CHAT,), "answers are not stored", False),
    _refused("service_tier", (CHAT,), "there is one tier", "auto", "default"),
    _refused("prompt_cache_options", (CHAT,), "the prefix cache has no options", {}),
    _refused("prompt_cache_retention", (CHAT,), "the prefix cache keeps nothing for a stated time"),
    ClientField(
        "prompt_cache_key",
        (CHAT,),
        "no effect",
        "A hint: the prefix cache finds equal beginnings by itself.",
        check=field_types.text("prompt_cache_key"),
        removed=True,
    ),
    ClientField(
        "safety_identifier",
        (CHAT,),
        "no effect",
        "Says who asks.",
        check=field_types.text("safety_identifier"),
        removed=True,
    ),
    _row("user", _BOTH, "no effect", "Says who asks.", field_types.given_text("user")),
    _row(
        "metadata",
        _BOTH,
        "no effect",
        "Labels for stored answers, and none is stored.",
        field_types.an_object("metadata"),
    ),
    ClientField(
        "prediction",
        (CHAT,),
        "honoured",
        "The embedded engine drafts tokens from it, which changes none of them (docs/speculation.md).",
        check=field_checks.prediction,
        removed=True,
    ),
    # What Dynamo adds.
    _row(
        "nvext",
        _BOTH,
        "frontend",
        "Dynamo's own fields; unknown ones are its 400. Refused: use_raw_prompt.",
        field_checks.nvext,
    ),
    _row(
        "stop_token_ids", _BOTH, "honoured", "End the answer. Refused as stop is.", field_checks.stops("stop_token_ids")
    ),
    _row(
        "include_stop_str_in_output",
        _BOTH,
        "honoured",
        "Shows what ended the answer.",
        field_types.truth("include_stop_str_in_output"),
    ),
    *(
        _row(name, _BOTH, "honoured", f"Runs as the processor {processor}. {_ONE_GUIDE}", field_checks.one_guide(name))
        for name, (processor, _) in GUIDES.items()
    ),
    ClientField(
        structured_outputs.FIELD,
        _BOTH,
        "honoured",
        "vLLM's: its json, regex, choice, grammar or json_object is the guide of that name. Refused: structural_tag, "
        "whitespace_pattern, disable_additional_properties.",
        check=structured_outputs.check,
        removed=True,
    ),
    _row(
        "guided_decoding_backend",
        _BOTH,
        "no effect",
        "Refused: another one than llguidance.",
        field_checks.guide_backend,
    ),
    _refused("guided_whitespace_pattern", _BOTH, "is not supported", ""),
    _switch("skip_special_tokens", _BOTH, "frontend", "The frontend makes the text."),
    _switch("return_tokens_as_token_ids", _BOTH, "frontend", "The frontend makes the text."),
    _switch("no_stop_trim", _BOTH, "frontend", "The frontend makes the text; 1.4.2 refuses it."),
    _switch("detokenize", _BOTH, "no effect", "The frontend makes the text."),
    _row(
        "cache_salt",
        _BOTH,
        "honoured",
        "Requests share the KV of common beginnings only if their salt is the same.",
        field_types.given_text("cache_salt"),
    ),
    _row("thinking", (CHAT,), "frontend", _TEMPLATE),
    _row("chat_template_args", (CHAT,), "frontend", _TEMPLATE, field_types.an_object("chat_template_args")),
    _row("chat_template_kwargs", (CHAT,), "frontend", _TEMPLATE, field_types.an_object("chat_template_kwargs")),
    _switch("add_generation_prompt", (CHAT,), "frontend", f"{_TEMPLATE} 1.4.2 refuses it."),
    _switch("continue_final_message", (CHAT,), "frontend", f"{_TEMPLATE} 1.4.2 refuses it."),
    _row(
        "prompt_logprobs",
        _BOTH,
        "honoured",
        "Log probabilities of the prompt, in vLLM's form: of each token but the first, and so many alternatives.",
        field_checks.prompt_logprobs,
    ),
    ClientField(
        "return_token_ids",
        _BOTH,
        "honoured",
        "The ids of prompt and answer, in vLLM's form: prompt_token_ids, and token_ids of each choice, with the end "
        "token.",
        check=field_checks.read_by_handler("return_token_ids"),
        removed=True,
    ),
    ClientField(
        "logprobs_mode",
        _BOTH,
        "honoured",
        "What log probabilities are of: raw (the model, the default), processed (what was sampled from), or train: "
        "token_ids and train_logprobs (log probabilities for a trainer).",
        check=field_checks.read_by_handler("logprobs_mode"),
        removed=True,
    ),
    _refused("prompt_embeds", (COMPLETIONS,), "prompts are text or token ids here"),
    _refused("mm_processor_kwargs", (CHAT,), _PREPARED, {}),
    _refused("media_io_kwargs", (CHAT,), _PREPARED, {}),
)


"""The fields that set no control under its own name, as `_PROMPT_FIELDS`."""

_FRONTEND_NOTES = {"thinking_token_budget": "1.4.2 refuses it."}
"""Peculiarities of Dynamo's frontends with fields of controls."""


def _control_row(control: Control) -> ClientField:
    why = " ".join(filter(None, (control.summary, _FRONTEND_NOTES.get(control.name))))
    check = field_types.of_control(control)
    if control.client_form == "forwarded":
        return _row(control.name, _BOTH, "honoured", why, check)
    return ClientField(control.name, _BOTH, "honoured", why, check=check, removed=True, control=control)


def client_fields(record: type[SamplingParams] = SamplingParams) -> tuple[ClientField, ...]:
    """The fields of requests whose controls are those of ``record``."""
    controls = [_control_row(one) for one in sampling_controls(record) if one.is_client_field]
    return (*_PROMPT_FIELDS, *controls, *_OTHER_FIELDS)


@cached
def tables(record: type[SamplingParams]) -> Mapping[str, Mapping[str, ClientField]]:
    """The fields of each endpoint, by name; the controls are those of ``record``."""
    return {path: {row.name: row for row in client_fields(record) if path in row.paths} for path in _BOTH}


FIELDS = client_fields()
TABLES = tables(SamplingParams)
"""The fields of the requests that are served."""

_MOST_LIKE = 32
"""Characters of the longest unknown name that is compared with those of the fields."""

INSTEAD: Mapping[str, str] = {
    # the other endpoint's
    "messages": "prompt, or POST /v1/chat/completions",
    "tools": "POST /v1/chat/completions",
    "response_format": "guided_json",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs with a number",
    "echo": "POST /v1/completions",
    # the openai package's, which puts what is in it beside the other fields
    "extra_body": "its fields themselves, beside model",
    # vLLM's
    "bad_words": "bad_words or phrase_ban of logits_processors",
    "vllm_xargs": "arguments of a processor of logits_processors",
    "repetition_detection": "loop_stop of logits_processors",
    "priority": "nvext.agent_hints.priority, where more is sooner",
    # SGLang's
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar, in Lark's syntax",
    "custom_logit_processor": "logits_processors, by name",
    "lora_path": "the adapter's name as model",
    # llama.cpp's, and those of Ollama and of transformers
    "options": "its fields themselves, beside model",
    "grammar": "guided_grammar, in Lark's syntax",
    "format": "guided_json",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "window of the processor repetition_penalty of logits_processors",
    "samplers": "order of logits_processors",
    "no_repeat_ngram_size": "no_repeat_ngram of logits_processors",
    "bad_words_ids": "bad_words_token_ids",
    "guidance_scale": "cfg of logits_processors",
    "banned_strings": "phrase_ban of logits_processors",
    **{
        f"{prefix}_{rest}": f"{processor} of logits_processors"
        for prefix, processor, names in (
            ("dry", "dry", ("multiplier", "base", "allowed_length", "sequence_breakers", "penalty_last_n")),
            ("xtc", "xtc", ("probability", "threshold")),
            ("mirostat", "mirostat", ("mode", "tau", "eta")),
            ("dynatemp", "dynamic_temperature", ("range", "low", "high", "exponent")),
        )
        for rest in names
    },
}
"""Names here of fields that other servers have and these requests have not."""


def instead_of(name: str, table: Mapping[str, ClientField], processors: Collection[str]) -> str:
    """The end of the refusal of an unknown field: what there is in its place, if that is known.

    Args:
        name: The field.
        table: The fields of the endpoint.
        processors: Names of the logits processors.
    """
    if name in INSTEAD:
        return f"; use {INSTEAD[name]}"
    if name in processors:
        return f"; use {name} of logits_processors"
    served = [row.name for row in table.values() if row.fate != "refused"] if len(name) <= _MOST_LIKE else ()
    close = get_close_matches(name, served, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""
