"""Chats whose prompt is token ids, which no chat template has to make."""

from __future__ import annotations

from typing import Any

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import shown

Body = dict[str, Any]

_FOR_TEMPLATE = (
    "add_generation_prompt",
    "chat_template_args",
    "chat_template_kwargs",
    "continue_final_message",
    "reasoning_effort",
    "thinking",
)

_PLACEHOLDER = [{"role": "user", "content": "-"}]
"""Messages that a frontend wants beside token ids, and does not read."""


def check_ids(path: str, value: Any) -> None:
    """Raises `FieldRefused` for what is no list of token ids, at least one."""
    if not isinstance(value, list) or not value:
        raise FieldRefused(path, f"must be a list of token ids that is not empty, got {shown(value)}")
    for place, one in enumerate(value):
        if type(one) is not int or not 0 <= one < 2**32:
            raise FieldRefused(f"{path}[{place}]", f"must be a token id, got {shown(one)}")


def with_prompt_as_messages(fields: Body) -> Body:
    """The fields of a chat for a frontend, which takes ids as ``nvext.token_data``.

    Raises:
        FieldRefused: the prompt is malformed, given twice, or beside a field for the template.
    """
    if fields.get("prompt") is None:
        return fields
    if fields.get("messages") is not None:
        raise FieldRefused("prompt", "cannot be given beside messages; give one of them")
    check_ids("prompt", fields["prompt"])
    for name in _FOR_TEMPLATE:
        if fields.get(name) is not None:
            raise FieldRefused(name, "is for the chat template, which makes no prompt of token ids")
    nvext = fields.get("nvext")
    if not isinstance(nvext, dict | None):
        raise FieldRefused("nvext", f"must be an object, got {shown(nvext)}")
    if (nvext or {}).get("token_data") is not None:
        raise FieldRefused("prompt", "cannot be given beside nvext.token_data; give one of them")
    made = {name: value for name, value in fields.items() if name != "prompt"}
    return {**made, "messages": _PLACEHOLDER, "nvext": {**(nvext or {}), "token_data": fields["prompt"]}}
