"""`AskedAnswer`: a body as it leaves the front door → the message for a worker, and the answer's
form.

A body has been checked by `worker.frontdoor.requests`: what is read here is what Dynamo's frontend
would read. A field that neither reads is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.catalog import ANNOTATION
from worker.errors import InvalidRequest, shown
from worker.frontdoor.client_names import METADATA_HEADER
from worker.frontdoor.field_checks import GUIDES
from worker.frontdoor.fields import CHAT
from worker.frontdoor.request_ids import DYNAMO_ID
from worker.runtimes.direct.openai_fields import guide_of, places
from worker.sampling import SamplingParams

Message = dict[str, Any]

ENGINE_DATA = "engine_data"
"""The entry of ``nvext.extra_fields`` that is served: the front door reads those of ids itself."""

_FORM = ("model", "stream", "stream_options", "return_tokens_as_token_ids")
_NO_EFFECT = ("user", "metadata", "guided_decoding_backend", "detokenize", "parallel_tool_calls")
_TENANT, _PRIORITY = b"x-tenant-id", b"x-dynamo-request-priority"


@dataclass(slots=True)
class AskedAnswer:
    """An answer that is asked for.

    Attributes:
        message: The message for `worker.runtimes.direct.request.parse`.
        is_chat: Whether it is a chat.
        model: Name of the model.
        is_streamed: Whether it comes as events.
        has_usage: Whether the last event has the usage.
        has_running_usage: Whether every event has it.
        names_ids: Whether the texts of tokens are ``token_id:`` and the id.
        annotations: Names of events before the answer that the client asks for, and other
            annotations.
        has_engine_data: Whether the answer has the worker's data.
    """

    message: Message
    is_chat: bool
    model: str
    is_streamed: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    names_ids: bool = False
    annotations: tuple[str, ...] = ()
    has_engine_data: bool = False


def read_body(path: str, body: Mapping[str, Any], headers: Mapping[bytes, bytes], *, thinks: bool) -> AskedAnswer:
    """The answer that a body asks for.

    Args:
        path: `CHAT` or `COMPLETIONS`.
        body: Fields that the front door has checked, and rewritten.
        headers: Headers of the request, names in lower case.
        thinks: Whether thinking comes before the answer, so that a guide begins behind it.

    Raises:
        InvalidRequest: a field is unknown here, or asks for what only Dynamo's frontend has.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:  # over which it wins
        given.pop("max_tokens", None)
    message: Message = {"sampling_options": {}, "stop_conditions": {}, "output_options": {}, "routing": {}}
    message["model"] = given.get("model")
    options = given.get("stream_options") or {}
    asked = AskedAnswer(
        message,
        path == CHAT,
        str(given.get("model")),
        is_streamed=given.get("stream") is True,
        has_usage=options.get("include_usage") is True,
        has_running_usage=options.get("include_usage") is True and options.get("continuous_usage_stats") is True,
        names_ids=given.get("return_tokens_as_token_ids") is True,
    )
    sections = places(SamplingParams)
    for name, value in given.items():
        section, reader = sections.get(name), _READERS.get(name)
        if section is not None:
            message[section][name] = value
        elif reader is not None:
            reader(asked, name, value)
        elif name not in (*_FORM, *_NO_EFFECT):
            raise InvalidRequest(name, "is a field of Dynamo's frontend, and the workers are asked without it")
    if "token_ids" in message:  # no template tells the model of tools
        message.pop("messages", None)
        message.pop("tools", None)
    _read_headers(asked, headers)
    if thinks and message["sampling_options"].get("guided_decoding") is not None:
        message["require_reasoning"] = True
    message["annotations"] = list(asked.annotations) or None
    return asked


_CLIENT_NAMES = {"routing.priority": "nvext.agent_hints.priority", "request id": DYNAMO_ID.decode()}


def client_name(path: str, body: Mapping[str, Any]) -> str:
    """The field of a body for one of the message that stands elsewhere in it; others stay."""
    if path == "chat_template_args" and path not in body:
        return next((name for name in _VARIABLES if name in body), path)
    return _CLIENT_NAMES.get(path, path)


Reader = Callable[[AskedAnswer, str, Any], None]


def _at(path: str) -> Reader:
    """Reader of a field that is one of the message's."""
    *sections, name = path.split(".")

    def read(asked: AskedAnswer, _: str, value: Any) -> None:
        section = asked.message
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value

    return read


def _prompt(asked: AskedAnswer, name: str, value: Any) -> None:
    while isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        (value,) = value
    if isinstance(value, list) and not all(type(one) is int for one in value):
        raise InvalidRequest(name, "must be one prompt here, a text or token ids")
    asked.message["prompt" if isinstance(value, str) else "token_ids"] = value


def _template(asked: AskedAnswer, name: str, value: Any) -> None:
    """Read a variable of the chat template, or an object of some."""
    variables = value if name in ("chat_template_args", "chat_template_kwargs") else {name: value}
    asked.message["chat_template_args"] = {**asked.message.get("chat_template_args", {}), **variables}


def _thinking(asked: AskedAnswer, name: str, value: Any) -> None:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind not in ("enabled", "disabled", True, False):
        raise InvalidRequest(name, f"must have the type enabled or disabled, got {shown(value)}")
    thinks = kind in ("enabled", True)
    _template(asked, "chat_template_args", {"enable_thinking": thinks, "thinking": thinks})


def _stop(asked: AskedAnswer, name: str, value: Any) -> None:
    asked.message["stop_conditions"]["stop"] = [value] if isinstance(value, str) else value


def _logprobs(asked: AskedAnswer, name: str, value: Any) -> None:
    options = asked.message["output_options"]
    if name == "top_logprobs":
        options["logprobs"] = value
    elif value is not False:
        options.setdefault("logprobs", 0 if value is True else value)


def _guide(asked: AskedAnswer, name: str, value: Any) -> None:
    kind = name.removeprefix("guided_")
    guide = guide_of(value) if name == "response_format" else {kind: value}
    if guide is not None:
        asked.message["sampling_options"]["guided_decoding"] = guide


def _tools(asked: AskedAnswer, name: str, value: Any) -> None:
    if name == "tools":
        asked.message["tools"] = value or None
    elif value not in ("auto", "none"):
        raise InvalidRequest(name, "a call is forced only where the front door knows how the model writes calls")


def _trim(asked: AskedAnswer, name: str, value: Any) -> None:
    if value is True:
        asked.message["sampling_options"].setdefault("include_stop_str_in_output", True)


def _nvext(asked: AskedAnswer, name: str, value: Any) -> None:
    for key, each in value.items():
        if each is None or (key == "use_raw_prompt" and each is False):
            continue
        if key == "annotations":
            asked.annotations += tuple(each)
        elif key == "extra_fields":
            for place, entry in enumerate(each):
                if entry != ENGINE_DATA:
                    problem = f"must be {ENGINE_DATA} without Dynamo's frontend, got {shown(entry)}"
                    raise InvalidRequest(f"nvext.extra_fields[{place}]", problem)
            asked.has_engine_data = bool(each)
        elif key == "max_thinking_tokens":
            asked.message["stop_conditions"][key] = each
        elif key == "token_data":  # in place of the messages
            asked.message["token_ids"] = each
        elif key == "cache_salt":
            asked.message["routing"][key] = each
        elif key == "agent_hints" and isinstance(each, Mapping) and set(each) <= {"priority"}:
            asked.message["routing"].update(each)
        else:
            raise InvalidRequest(f"nvext.{key}", "is for Dynamo's frontend, and the workers are asked without it")


def _read_headers(asked: AskedAnswer, headers: Mapping[bytes, bytes]) -> None:
    routing = asked.message["routing"]
    if METADATA_HEADER in headers:
        asked.annotations += (ANNOTATION + headers[METADATA_HEADER].decode("latin-1"),)
    if headers.get(_TENANT):
        routing["cache_salt"] = headers[_TENANT].decode("latin-1")  # a gateway's word, over the client's
    if _PRIORITY in headers:
        try:
            routing.setdefault("priority", int(headers[_PRIORITY]))
        except ValueError:
            raise InvalidRequest(_PRIORITY.decode(), "must be an integer") from None


_VARIABLES = (
    *("chat_template_kwargs", "chat_template_args", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields with variables of the chat template."""

_READERS: Mapping[str, Reader] = {
    "messages": _at("messages"),
    "prompt": _prompt,
    "max_completion_tokens": _at("stop_conditions.max_tokens"),
    "thinking_token_budget": _at("stop_conditions.max_thinking_tokens"),
    "stop": _stop,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _at("output_options.prompt_logprobs"),
    "response_format": _guide,
    **dict.fromkeys(GUIDES, _guide),
    "tools": _tools,
    "tool_choice": _tools,
    **dict.fromkeys(_VARIABLES, _template),
    "thinking": _thinking,
    "cache_salt": _at("routing.cache_salt"),
    "no_stop_trim": _trim,
    "nvext": _nvext,
}
"""Readers of the fields that stand elsewhere in the message."""
