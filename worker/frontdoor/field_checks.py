"""Checks of single fields of a chat or completion request: Dynamo's frontend would drop what they
refuse, or fail on it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from adapters.catalog import MAX_CHOICES
from worker.errors import InvalidRequest
from worker.frontdoor.chat_prompt import check_ids
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.returned_tokens import EXTRA_FIELDS
from worker.frontdoor.tool_choice import allowed_places, forces_call, is_allowed_tools
from worker.frontdoor.values import Object, integer, keys_within, object_of, object_within, shown, text
from worker.requests.fields import GUIDE_BACKENDS, OTHER_BACKEND
from worker.runtimes.direct.pictures import is_picture, picture_url
from worker.sampling import MAX_LOGPROBS

Body = Object
Check = Callable[[Any, Body], None]
"""Raises `FieldRefused` for a value, given the whole request."""

GUIDES: Mapping[str, tuple[str, str]] = {
    "guided_json": ("json_schema", "schema"),
    "guided_regex": ("regex", "pattern"),
    "guided_grammar": ("grammar", "lark"),
    "guided_choice": ("choice", "choices"),
}
"""Field → the processor that it runs as, and the argument for its value."""


@cache
def is_before_1_6(version: str | None = None) -> bool:
    """Whether Dynamo's frontend is older than 1.6; False where it is not installed.

    Args:
        version: Version of ai-dynamo, by default the installed one.
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
        version: See `is_before_1_6`.
    """
    return 4 if is_before_1_6(version) else None


MAX_STOPS = stop_limit()


def stops(name: str) -> Check:
    def check(value: Any, body: Body) -> None:
        if name == "stop_token_ids":
            _entries(name, value, lambda each: type(each) is int and 0 <= each < 2**32, "a token id")
        elif not isinstance(value, str):
            _entries(name, value, lambda each: isinstance(each, str) and bool(each), "a text that is not empty")
        if value == "":
            raise FieldRefused(name, "must not be empty")
        if not value:
            return
        if body.get("ignore_eos") is True:
            raise FieldRefused(name, "cannot be given beside ignore_eos, which makes Dynamo's frontend drop it")
        if MAX_STOPS is not None and isinstance(value, list) and len(value) > MAX_STOPS:
            raise FieldRefused(name, f"must have at most {MAX_STOPS} entries, got {len(value)}")

    return check


def _entries(path: str, value: Any, is_entry: Callable[[Any], bool], what: str) -> None:
    """Refuse what is no list of such entries."""
    if not isinstance(value, list):
        raise FieldRefused(path, f"must be a list, each {what}, got {shown(value)}")
    for i, each in enumerate(value):
        if not is_entry(each):
            raise FieldRefused(f"{path}[{i}]", f"must be {what}, got {shown(each)}")


_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_CHOICES = ("none", "auto", "required")
_GUIDE_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "guided_json": ((dict, str), "a JSON Schema: an object, or a text with one"),
    "guided_regex": ((str,), "a text"),
    "guided_grammar": ((str,), "a text"),
    "guided_choice": ((list,), "a list of texts"),
}

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
    "parsed",
    "prompt_cache_breakpoint",
)
"""Keys that Dynamo's frontend gives to the chat template, and those that cannot concern it:
annotations, and what the openai package parsed, are part of an answer that a client sends back,
breakpoints are hints for a cache.
"""


def messages(value: Any, body: Body) -> None:
    if not isinstance(value, list):
        raise FieldRefused("messages", f"must be a list of messages, got {shown(value)}")
    if not value and body.get("tools"):  # their text would be a message, and the frontend refuse none
        raise FieldRefused("messages", "must have at least one message")
    for i, message in enumerate(value):
        path = f"messages[{i}]"
        object_within(path, message, _MESSAGE_KEYS)
        role = message.get("role")
        if role not in _ROLES:
            raise FieldRefused(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")
        for key in ("name", "tool_call_id", "refusal", "reasoning_content"):
            _must_be(f"{path}.{key}", message.get(key), str, "a text")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise FieldRefused(f"{path}.content", f"must be a text or a list of parts, got {shown(content)}")
        for key in ("name", "content") if role == "function" else ():  # the frontend fails without them
            if not isinstance(message.get(key), str):
                raise FieldRefused(f"{path}.{key}", "must be a text in a message of the role function")
        if message.get("tool_calls") is not None:
            _calls(f"{path}.tool_calls", message["tool_calls"])
        if content == []:
            raise FieldRefused(f"{path}.content", "must have at least one part")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if is_picture(part):
                _picture(f"{path}.content[{j}]", role, part)
                continue
            if kind != "text":
                problem = f"must be of type text or image_url, got {shown(kind)}"
                raise FieldRefused(f"{path}.content[{j}]", problem)
            text(f"{path}.content[{j}].text", part.get("text"))
            keys_within(f"{path}.content[{j}]", part, _PART_KEYS)


def _picture(path: str, role: str, part: Body) -> None:
    if role != "user":
        raise FieldRefused(path, f"must be of type text in a message of the {role}; the user's may have pictures")
    try:
        picture_url(path, part)
    except InvalidRequest as error:
        raise FieldRefused(error.field, error.problem) from None


def _calls(path: str, value: Any) -> None:
    """Check the calls of a message, which may become text before the frontend sees them."""
    _must_be(path, value, list, "a list of calls")
    for i, call in enumerate(value):
        object_of(f"{path}[{i}]", call)
        kind, function = call.get("type"), call.get("function")
        if kind not in (None, "function"):
            raise FieldRefused(f"{path}[{i}].type", f"must be function, got {shown(kind)}")
        _must_be(f"{path}[{i}].id", call.get("id"), str, "a text")
        _must_be(f"{path}[{i}].function", function, dict, "an object")
        for key in ("name", "arguments"):
            _must_be(f"{path}[{i}].function.{key}", (function or {}).get(key), str, "a text")


def _must_be(path: str, value: Any, kind: type, what: str) -> None:
    """Refuse a value of another type, unless it is null."""
    if value is not None and not isinstance(value, kind):
        raise FieldRefused(path, f"must be {what}, got {shown(value)}")


_FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": ("type", "format", "structures", "triggers"),
}
"""The keys of each type of ``response_format``."""


def response_format(value: Any, body: Body) -> None:
    kind = object_of("response_format", value).get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise FieldRefused("response_format.type", f"must be one of {', '.join(_FORMATS)}, got {shown(kind)}")
    keys_within("response_format", value, _FORMATS[kind])
    if kind == "json_schema":
        path, given = "response_format.json_schema", value.get("json_schema")
        schema = given if isinstance(given, dict) else {}  # which lacks its schema
        keys_within(path, schema, ("name", "description", "schema", "strict"))
        _must_be(f"{path}.name", schema.get("name"), str, "a text")
        _must_be(f"{path}.description", schema.get("description"), str, "a text")
        _must_be(f"{path}.strict", schema.get("strict"), bool, "true or false")
        if not isinstance(schema.get("schema"), dict | bool):
            raise FieldRefused(f"{path}.schema", "must be a JSON Schema")
        if schema.get("name") is None:
            raise FieldRefused(f"{path}.name", "must be given")
    if kind == "structural_tag" and body.get("tools") and forces_call(body):
        raise FieldRefused("response_format", "cannot be given beside a tool_choice that forces a call")


def prediction(value: Any, body: Body) -> None:
    object_within("prediction", value, ("type", "content"))
    if value.get("type") != "content":
        raise FieldRefused("prediction.type", f"must be content, got {shown(value.get('type'))}")
    content = value.get("content")
    if isinstance(content, str):
        _predicted("prediction.content", content)
        return
    if not isinstance(content, list):
        raise FieldRefused("prediction.content", f"must be a text or a list of parts, got {shown(content)}")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise FieldRefused(f"prediction.content[{i}]", f"must be of type text, got {shown(kind)}")
        _predicted(f"prediction.content[{i}].text", part.get("text"))


def _predicted(path: str, value: Any) -> None:
    if "\0" in text(path, value):
        raise FieldRefused(path, "must not hold NUL")


def stream_options(value: Any, body: Body) -> None:
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    object_within("stream_options", value, known)
    for key in known:
        _must_be(f"stream_options.{key}", value.get(key), bool, "true or false")
    if value.get("include_obfuscation"):
        raise FieldRefused("stream_options.include_obfuscation", "is not supported")


def tools(value: Any, body: Body) -> None:
    _must_be("tools", value, list, "a list of tools")
    for i, tool in enumerate(value):
        path = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise FieldRefused(f"{path}.type", f"must be function, got {shown(kind)}")
        keys_within(path, tool, ("type", "function"))
        known = ("name", "description", "parameters", "strict")
        function = object_within(f"{path}.function", tool.get("function"), known)
        text(f"{path}.function.name", function.get("name"))
        _must_be(f"{path}.function.description", function.get("description"), str, "a text")
        _must_be(f"{path}.function.strict", function.get("strict"), bool, "true or false")
        _must_be(f"{path}.function.parameters", function.get("parameters"), dict, "a JSON Schema, an object")


def tool_choice(value: Any, body: Body) -> None:
    if is_allowed_tools(value):
        allowed_places(body)
    elif isinstance(value, dict):
        if value.get("type") != "function":
            kind = shown(value.get("type"))
            raise FieldRefused("tool_choice.type", f"must be function or allowed_tools, got {kind}")
        keys_within("tool_choice", value, ("type", "function"))
        given = value.get("function")
        function = given if isinstance(given, dict) else {}  # which lacks its name
        keys_within("tool_choice.function", function, ("name",))
        text("tool_choice.function.name", function.get("name"))
    elif value not in _CHOICES:
        raise FieldRefused("tool_choice", f"must be one of {', '.join(_CHOICES)}, or an object, got {shown(value)}")
    if forces_call(body) and not body.get("tools"):
        raise FieldRefused("tool_choice", "forces a call, and there are no tools")


def prompt(value: Any, body: Body) -> None:
    is_list = isinstance(value, list) and not (value and all(type(one) is int for one in value))
    if is_list and not value:
        raise FieldRefused("prompt", "must not be empty")
    kinds = {type(one) for one in value} if is_list else set()
    for i, one in enumerate(value if is_list else [value]):
        path = f"prompt[{i}]" if is_list else "prompt"
        if kinds == {str, list} and not isinstance(one, type(value[0])):
            raise FieldRefused(path, "must be as prompt[0] is: all are texts, or all are lists of token ids")
        if not isinstance(one, str | list) or one == []:
            raise FieldRefused(path, f"must be a text, or a list of token ids that is not empty, got {shown(one)}")
        if isinstance(one, list):
            check_ids(path, one)


def logprobs(value: Any, body: Body) -> None:
    if "messages" in body:
        _must_be("logprobs", value, bool, "true or false")
    else:
        integer("logprobs", value, 0)


def top_logprobs(value: Any, body: Body) -> None:
    integer("top_logprobs", value, 0, MAX_LOGPROBS)
    if value and body.get("logprobs") is not True:
        raise FieldRefused("top_logprobs", "needs logprobs: true")


def echo(value: Any, body: Body) -> None:
    _must_be("echo", value, bool, "true or false")
    # the handler of completions takes it out, so that here it would be lost
    if value is not False:
        raise FieldRefused("echo", "is served by POST /v1/completions alone")


_BY_HANDLERS = "is served by POST /v1/completions and /v1/chat/completions alone"


def read_by_handler(name: str) -> Check:
    """A field that the handlers of chats and completions take out: elsewhere it would be lost."""

    def check(value: Any, body: Body) -> None:
        raise FieldRefused(name, _BY_HANDLERS)

    return check


def prompt_logprobs(value: Any, body: Body) -> None:
    integer("prompt_logprobs", value, 0, MAX_LOGPROBS)
    # where no handler reads them from the worker's data they would be lost (`nvext` checks types)
    given = {} if body.get("nvext") is None else body["nvext"]
    extra = (given.get("extra_fields") or []) if isinstance(given, dict) else None
    if isinstance(extra, list) and "engine_data" not in extra:
        raise FieldRefused("prompt_logprobs", _BY_HANDLERS)


def one_guide(name: str) -> Check:
    def check(value: Any, body: Body) -> None:
        if value in ([], ""):
            raise FieldRefused(name, "must not be empty")
        types, what = _GUIDE_TYPES[name]
        if not isinstance(value, types):
            raise FieldRefused(name, f"must be {what}, got {shown(value)}")
        if isinstance(value, list):
            _entries(name, value, lambda each: isinstance(each, str) and bool(each), "a text that is not empty")
        guides = [other for other in GUIDES if body.get(other) is not None]
        if isinstance(body.get("response_format"), dict) and body["response_format"].get("type") != "text":
            guides.append("response_format")
        if body.get("tools") and forces_call(body):
            guides.append("tool_choice")
        if len(guides) > 1:
            raise FieldRefused(name, f"cannot be given beside {', '.join(g for g in guides if g != name)}")

    return check


def guide_backend(value: Any, body: Body) -> None:
    if value not in GUIDE_BACKENDS:
        raise FieldRefused("guided_decoding_backend", OTHER_BACKEND)


_ALSO_IN_NVEXT = {"cache_salt": "cache_salt", "max_thinking_tokens": "thinking_token_budget"}
"""Fields of ``nvext`` by name, and those of the request that say the same."""


def nvext(value: Any, body: Body) -> None:
    _must_be("nvext", value, dict, "an object")
    for key in ("annotations", "extra_fields"):
        if value.get(key) is not None:
            _entries(f"nvext.{key}", value[key], lambda each: isinstance(each, str), "a text")
    # the handlers of chats and completions take them out; of others a frontend would drop them
    unread = [name for name in EXTRA_FIELDS if name in (value.get("extra_fields") or ())]
    if unread:
        raise FieldRefused("nvext.extra_fields", f"{unread[0]} {_BY_HANDLERS}")
    if value.get("token_data") is not None:
        check_ids("nvext.token_data", value["token_data"])
        if isinstance(body.get("prompt"), list):
            raise FieldRefused(
                "nvext.token_data", "is what one text becomes; cannot be given beside a prompt of a list"
            )
    if value.get("cache_salt") == "":
        raise FieldRefused("nvext.cache_salt", "must not be empty")
    for key, name in _ALSO_IN_NVEXT.items():
        if None not in (value.get(key), body.get(name)) and value[key] != body[name]:
            raise FieldRefused(f"nvext.{key}", f"cannot be another than {name}; give one of them")
    _must_be("nvext.use_raw_prompt", value.get("use_raw_prompt"), bool, "true or false")
    if value.get("use_raw_prompt"):
        raise FieldRefused(
            "nvext.use_raw_prompt", "is not supported: Dynamo's frontend applies the chat template anyway"
        )


def num_choices(value: Any, body: Body) -> None:
    integer("n", value, 1, MAX_CHOICES)
