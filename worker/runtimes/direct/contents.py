"""Contents of messages as a chat template takes them: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROBE = "a text that a template shows"


def takes_texts(tokenizer: Any, template: str | None = None) -> bool:
    """Whether the chat template takes contents that are texts. Those of some models that see
    pictures show lists of parts alone.

    Args:
        tokenizer: Tokenizer of the checkpoint.
        template: Chat template that replaces the model's own.
    """
    return _shows(_PROBE, tokenizer, template) or not _shows([_part(_PROBE)], tokenizer, template)


def _shows(content: Any, tokenizer: Any, template: str | None) -> bool:
    messages = [{"role": "user", "content": content}]
    try:
        return _PROBE in tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # the boundary of the checkpoint's chat template, which may not be there
        return False


def normalised(messages: Any) -> Any:
    """The messages as chat templates know them. The assistant's have an empty text where they have
    no content: clients send calls back so, and a template that joins role and content fails. They
    are without what the openai package parsed of them, which templates that write a whole call as
    JSON would show to the model. The role developer, OpenAI's later name of system, is system: few
    templates know it.

    Args:
        messages: Messages of a chat; what is no list of them stays as it is.
    """
    if not isinstance(messages, list):
        return messages
    return [_normalised(each) for each in messages]


def _normalised(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    if message.get("role") != "assistant":
        return message
    plain = {key: each for key, each in message.items() if key != "parsed"}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_without_parsed_arguments(call) for call in plain["tool_calls"]]
    return plain if plain.get("content") is not None else {**plain, "content": ""}


def _without_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "parsed_arguments" not in function:
        return call
    return {**call, "function": {key: each for key, each in function.items() if key != "parsed_arguments"}}


def fitted(messages: Any, texts: bool) -> Any:
    """The messages with their contents as the chat template takes them, as Dynamo's frontend gives
    them to it: parts that are all texts as one text, each on lines of its own; or a text as a part.

    Args:
        messages: Messages of a chat; what is no list of them stays as it is.
        texts: Result of `takes_texts`.
    """
    if not isinstance(messages, list):
        return messages
    return [_with_text(each) if texts else _with_parts(each) for each in messages]


def _with_text(message: Any) -> Any:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(each, Mapping) and "text" in each for each in parts):
        return message
    return {**message, "content": "\n".join(str(each["text"]) for each in parts)}


def _with_parts(message: Any) -> Any:
    text = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [_part(text)]} if isinstance(text, str) else message


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
