"""Every field of OpenAI's chat and completion requests, and those that Dynamo adds: what becomes of
it at the front door and behind it.

*Honoured*: the answer follows it. *Frontend*: Dynamo's frontend acts on it. *No effect*: by nature;
it changes no token. *Refused*: a 400 that names it, unless its value asks for nothing.
`docs/request.md` has this table for clients, and a test compares the two.

The fates behind the door were measured with the frontends of ai-dynamo 1.4.2 and 1.6.1.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adapters.catalog import MAX_CHOICES
from worker.frontdoor.errors import FieldRefused

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Body = dict[str, Any]
Check = Callable[[Any, Body], None]
"""Raises `FieldRefused` for a value, given the whole request."""

Fate = Literal["honoured", "frontend", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """One top-level field.

    Attributes:
        name: Its name.
        paths: Endpoints that have it.
        fate: What becomes of it.
        why: What it does, or why not; the row of `docs/request.md`.
        neutral: Values of a refused field that, like null, ask for nothing.
        check: Refuses values.
        removed: Whether the front door takes it out of the request.
    """

    name: str
    paths: tuple[str, ...]
    fate: Fate
    why: str
    neutral: tuple[Any, ...] = ()
    check: Check | None = None
    removed: bool = False

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether ``value`` is as good as absent, for a refused field."""
        return value is None or any(type(value) is type(each) and value == each for each in self.neutral)


def is_before_1_6(version: str | None = None) -> bool:
    """Whether Dynamo's frontend is older than 1.6; False where it is not installed.

    Args:
        version: Of ai-dynamo; by default the one that is installed here.
    """
    if version is None:
        try:
            version = importlib.metadata.version("ai-dynamo")
        except importlib.metadata.PackageNotFoundError:
            return False
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) < (1, 6)


def stop_limit(version: str | None = None) -> int | None:
    """Stop strings, and stop token ids, that the frontend takes; it answers more with a 500.

    Args:
        version: As of `is_before_1_6`.
    """
    return 4 if is_before_1_6(version) else None


MAX_STOPS = stop_limit()


def _stops(name: str) -> Check:
    def check(value: Any, body: Body) -> None:
        if not isinstance(value, list | str) or not value:
            return  # the frontend refuses it
        if body.get("ignore_eos") is True:
            raise FieldRefused(name, "cannot be given beside ignore_eos, which makes Dynamo's frontend drop it")
        if MAX_STOPS is not None and isinstance(value, list) and len(value) > MAX_STOPS:
            raise FieldRefused(name, f"must have at most {MAX_STOPS} entries, got {len(value)}")

    return check


def _known_keys(path: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse the keys of an object that the frontend would drop."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in known and each is not None:
                raise FieldRefused(f"{path}.{shown(key)}", f"unknown field; known are {', '.join(known)}")


def shown(key: str) -> str:
    """A key of the client's for a message: at most 60 characters, printable ASCII."""
    text = json.dumps(key)[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


_PART_KEYS = ("type", "text", "prompt_cache_breakpoint")
_MESSAGE_KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "function_call",
    "reasoning_content",
    "annotations",
    "prompt_cache_breakpoint",
)
"""What Dynamo's frontend gives to the chat template, and what cannot concern it: annotations are
part of an answer that a client sends back, breakpoints are hints for a cache.
"""


def _messages(value: Any, body: Body) -> None:
    for i, message in enumerate(value if isinstance(value, list) else ()):
        path = f"messages[{i}]"
        _known_keys(path, message, _MESSAGE_KEYS)
        content = message.get("content") if isinstance(message, dict) else None
        if content == []:
            raise FieldRefused(f"{path}.content", "must have at least one part")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise FieldRefused(f"{path}.content[{j}]", f"must be of type text, got {shown(str(kind))}")
            _known_keys(f"{path}.content[{j}]", part, _PART_KEYS)


_FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": ("type", "format", "structures", "triggers"),
}
"""The keys of each type of ``response_format``."""


def _response_format(value: Any, body: Body) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise FieldRefused("response_format.type", f"must be one of {', '.join(_FORMATS)}, got {shown(str(kind))}")
    _known_keys("response_format", value, _FORMATS[kind])
    if kind == "json_schema":
        schema = value.get("json_schema")
        _known_keys("response_format.json_schema", schema, ("name", "description", "schema", "strict"))
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict | bool):
            raise FieldRefused("response_format.json_schema.schema", "must be a JSON Schema")
    if kind != "text" and body.get("tools") and forces_call(body):
        raise FieldRefused("response_format", "cannot be given beside a tool_choice that forces a call")


def _stream_options(value: Any, body: Body) -> None:
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    _known_keys("stream_options", value, known)
    if isinstance(value, dict) and value.get("include_obfuscation"):
        raise FieldRefused("stream_options.include_obfuscation", "is not supported")


def _tools(value: Any, body: Body) -> None:
    for i, tool in enumerate(value if isinstance(value, list) else ()):
        path = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise FieldRefused(f"{path}.type", f"must be function, got {shown(str(kind))}")
        _known_keys(path, tool, ("type", "function"))
        _known_keys(f"{path}.function", tool.get("function"), ("name", "description", "parameters", "strict"))


def forces_call(body: Body) -> bool:
    """Whether ``tool_choice`` asks for a call, of any tool or of one."""
    choice = body.get("tool_choice")
    return choice == "required" or isinstance(choice, dict)


def _tool_choice(value: Any, body: Body) -> None:
    if isinstance(value, dict) and value.get("type") != "function":
        raise FieldRefused("tool_choice.type", f"must be function, got {shown(str(value.get('type')))}")
    _known_keys("tool_choice", value, ("type", "function"))
    if forces_call(body) and not body.get("tools"):
        raise FieldRefused("tool_choice", "forces a call, and there are no tools")


def _top_logprobs(value: Any, body: Body) -> None:
    if value and body.get("logprobs") is not True:
        raise FieldRefused("top_logprobs", "needs logprobs: true")


def _guide(name: str) -> Check:
    def check(value: Any, body: Body) -> None:
        if value in ([], ""):
            raise FieldRefused(name, "must not be empty")
        guides = [other for other in GUIDES if body.get(other) is not None]
        if isinstance(body.get("response_format"), dict) and body["response_format"].get("type") != "text":
            guides.append("response_format")
        if body.get("tools") and forces_call(body):
            guides.append("tool_choice")
        if len(guides) > 1:
            raise FieldRefused(name, f"cannot be given beside {', '.join(g for g in guides if g != name)}")

    return check


def _guide_backend(value: Any, body: Body) -> None:
    if value not in ("auto", "guidance", "llguidance"):
        raise FieldRefused("guided_decoding_backend", "this worker decodes grammars with llguidance")


def _nvext(value: Any, body: Body) -> None:
    if isinstance(value, dict) and value.get("use_raw_prompt"):
        raise FieldRefused(
            "nvext.use_raw_prompt", "is not supported: Dynamo's frontend applies the chat template anyway"
        )


_BOTH = (CHAT, COMPLETIONS)
GUIDES = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")
_TEXT_ONLY = "this worker serves text only"
_OLD = "is deprecated; use tools and tool_choice"
_TEMPLATE = "For the chat template."
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_ONE_GUIDE = "At most one guide per request."


def _num_choices(value: Any, body: Body) -> None:
    if type(value) is not int or not 1 <= value <= MAX_CHOICES:
        raise FieldRefused("n", f"must be an integer from 1 to {MAX_CHOICES}, got {shown(str(value))}")


def _row(name: str, paths: tuple[str, ...], fate: Fate, why: str, check: Check | None = None) -> Field:
    return Field(name, paths, fate, why, check=check)


def _refused(name: str, paths: tuple[str, ...], why: str, *neutral: Any) -> Field:
    return Field(name, paths, "refused", why, (*_NOTHING, *neutral), removed=True)


FIELDS: tuple[Field, ...] = (
    _row("model", _BOTH, "frontend", "Which model answers; a name that is not served is a 404."),
    _row(
        "messages",
        (CHAT,),
        "honoured",
        "The prompt, by the chat template. An assistant's message without content, as calls come back, has an empty "
        f"text. Parts other than text: {_TEXT_ONLY}.",
        _messages,
    ),
    _row("prompt", (COMPLETIONS,), "honoured", "The prompt: text, token ids, or a list of either, one choice each."),
    _row("max_tokens", _BOTH, "honoured", "Tokens to generate at most."),
    _row("max_completion_tokens", (CHAT,), "honoured", "As max_tokens, over which it wins."),
    _row("temperature", _BOTH, "honoured", "0 is greedy; nothing set is greedy too."),
    _row("top_p", _BOTH, "honoured", "Shortest prefix of the ranked tokens whose mass reaches it."),
    _row("frequency_penalty", _BOTH, "honoured", "Penalty per occurrence in the answer."),
    _row("presence_penalty", _BOTH, "honoured", "Penalty for tokens that the answer has."),
    _row("seed", _BOTH, "honoured", "Fixes the draws."),
    _row(
        "stop",
        _BOTH,
        "frontend",
        "Ends the answer. Refused: more than 4 with a frontend of 1.4.2, and beside ignore_eos.",
        _stops("stop"),
    ),
    _row("stream", _BOTH, "frontend", "Server-sent events."),
    _row(
        "stream_options",
        _BOTH,
        "frontend",
        "include_usage, continuous_usage_stats. Refused: include_obfuscation, and unknown keys.",
        _stream_options,
    ),
    Field("logit_bias", _BOTH, "honoured", "Becomes the processor logit_bias.", removed=True),
    Field(
        "logits_processors",
        _BOTH,
        "honoured",
        "Not OpenAI's: a list of processors, or an object with them, receipt, deadline, order and speculation "
        "(docs/front-door.md).",
        removed=True,
    ),
    _row("logprobs", _BOTH, "honoured", "Log probabilities of the answer."),
    _row("top_logprobs", (CHAT,), "honoured", "Alternatives per token. Refused without logprobs: true.", _top_logprobs),
    _row(
        "response_format",
        (CHAT,),
        "honoured",
        "json_object, json_schema and structural_tag run as processors, whatever strict says. "
        "Refused: other types, unknown keys, beside a forced call.",
        _response_format,
    ),
    _row(
        "tools",
        (CHAT,),
        "honoured",
        f"{_TEMPLATE} With a format of calls every call is held to its schema; without one strict: true needs a forced "
        "call. Refused: custom tools.",
        _tools,
    ),
    _row(
        "tool_choice",
        (CHAT,),
        "honoured",
        "Runs as the processor tool_calls; without a format of calls a forced call runs as json_schema, and none only "
        "leaves out the tools. Refused: allowed_tools, custom.",
        _tool_choice,
    ),
    _row(
        "parallel_tool_calls",
        (CHAT,),
        "honoured",
        "Without a format of calls false is refused, unless there are no tools, none may be called, or one is named.",
    ),
    _row("reasoning_effort", (CHAT,), "frontend", _TEMPLATE),
    _row(
        "n", _BOTH, "honoured", f"Answers, 1 to {MAX_CHOICES}, each a request of its own to the workers.", _num_choices
    ),
    _refused("best_of", (COMPLETIONS,), "answers are not compared with each other; n gives several", 1),
    _refused("echo", (COMPLETIONS,), "would need log probabilities of the prompt"),
    _refused("suffix", (COMPLETIONS,), "text after the answer is not supported; Dynamo's frontend drops it"),
    _refused("modalities", (CHAT,), _TEXT_ONLY, ["text"]),
    _refused("audio", (CHAT,), _TEXT_ONLY),
    Field("web_search_options", (CHAT,), "refused", "there is no web search; Dynamo's frontend drops it", removed=True),
    _refused("moderation", (CHAT,), "there is no moderation"),
    _refused("verbosity", (CHAT,), "is not supported"),
    _refused("functions", (CHAT,), _OLD),
    _refused("function_call", (CHAT,), _OLD, "none", "auto"),
    _refused("store", (CHAT,), "answers are not stored"),
    _refused("service_tier", (CHAT,), "there is one tier", "auto", "default"),
    _refused("prompt_cache_options", (CHAT,), "the prefix cache has no options"),
    _refused("prompt_cache_retention", (CHAT,), "the prefix cache keeps nothing for a stated time"),
    Field(
        "prompt_cache_key",
        (CHAT,),
        "no effect",
        "A hint: the prefix cache finds equal beginnings by itself.",
        removed=True,
    ),
    Field("safety_identifier", (CHAT,), "no effect", "Says who asks.", removed=True),
    _row("user", _BOTH, "no effect", "Says who asks."),
    _row("metadata", _BOTH, "no effect", "Labels for stored answers, and none is stored."),
    _row("prediction", (CHAT,), "no effect", "A hint for speed: it changes no token."),
    # What Dynamo adds.
    _row("nvext", _BOTH, "frontend", "Dynamo's own fields; unknown ones are its 400. Refused: use_raw_prompt.", _nvext),
    _row("top_k", _BOTH, "honoured", "Tokens to draw from; -1 and 0 mean all."),
    _row("min_p", _BOTH, "honoured", "Tokens less likely than this times the likeliest are not drawn."),
    _row("repetition_penalty", _BOTH, "honoured", "Scales the logits of all tokens of prompt and answer."),
    _row("min_tokens", _BOTH, "honoured", "No stop token ends the answer before."),
    _row("ignore_eos", _BOTH, "honoured", "The model's end tokens do not end the answer."),
    _row("stop_token_ids", _BOTH, "honoured", "End the answer. Refused as stop is.", _stops("stop_token_ids")),
    _row("include_stop_str_in_output", _BOTH, "honoured", "Shows what ended the answer."),
    _row("allowed_token_ids", _BOTH, "honoured", "Runs as the processor allowed_tokens."),
    _row("bad_words_token_ids", _BOTH, "honoured", "Runs as the processor bad_words."),
    *(
        _row(name, _BOTH, "honoured", f"Runs as the processor {processor}. {_ONE_GUIDE}", _guide(name))
        for name, processor in zip(GUIDES, ("json_schema", "regex", "grammar", "choice"), strict=True)
    ),
    _row("guided_decoding_backend", _BOTH, "no effect", "Refused: another one than llguidance.", _guide_backend),
    _refused("guided_whitespace_pattern", _BOTH, "is not supported"),
    _row("skip_special_tokens", _BOTH, "frontend", "The frontend makes the text."),
    _row("return_tokens_as_token_ids", _BOTH, "frontend", "The frontend makes the text."),
    _row("no_stop_trim", _BOTH, "frontend", "The frontend makes the text; 1.4.2 refuses it."),
    _row("detokenize", _BOTH, "no effect", "The frontend makes the text."),
    _row("cache_salt", _BOTH, "honoured", "Requests share the KV of common beginnings only if their salt is the same."),
    _row("thinking_token_budget", _BOTH, "honoured", "Runs as the processor thinking_budget; 1.4.2 refuses it."),
    _row("thinking", (CHAT,), "frontend", _TEMPLATE),
    _row("chat_template_args", (CHAT,), "frontend", _TEMPLATE),
    _row("chat_template_kwargs", (CHAT,), "frontend", _TEMPLATE),
    _row("add_generation_prompt", (CHAT,), "frontend", f"{_TEMPLATE} 1.4.2 refuses it."),
    _row("continue_final_message", (CHAT,), "frontend", f"{_TEMPLATE} 1.4.2 refuses it."),
    _refused("prompt_logprobs", _BOTH, "log probabilities of the prompt are not supported"),
    _refused("prompt_embeds", (COMPLETIONS,), "prompts are text or token ids here"),
    _refused("mm_processor_kwargs", (CHAT,), _TEXT_ONLY),
    _refused("media_io_kwargs", (CHAT,), _TEXT_ONLY),
)


def _by_path(path: str) -> Mapping[str, Field]:
    return {field.name: field for field in FIELDS if path in field.paths}


TABLES: Mapping[str, Mapping[str, Field]] = {path: _by_path(path) for path in _BOTH}
"""The fields of each endpoint, by name."""

UNCHECKED = ("/v1/responses", "/v1/messages", "/v1/generate")
"""Endpoints of the frontend that generate text too, and drop what they do not know."""
