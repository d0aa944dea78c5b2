"""Chats and completions that the front door asks a frontend for on behalf of a handler.

They are always streamed, and a whole answer is put together of the chunks: streamed or not, an
answer is the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Any

from worker.frontdoor.asking import Caller, ask
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.refusal_reading import explained
from worker.frontdoor.returned_tokens import join_returned, joined_nvext
from worker.frontdoor.tool_reading import tool_reading


class AnswerFailed(Exception):
    """An answer ended before its end.

    Args:
        refused: The error that would be the answer, if it had not begun.
    """

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


async def chat(
    caller: Caller, fields: dict[str, Any], *, path: str = CHAT, annotations: dict[str, Any] | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of the answer to a chat or completion, the last one with the usage.

    Args:
        caller: Requester on whose behalf it is asked.
        fields: The request as a client would write it. Its ``stream`` does not matter, and the
            usage is always included.
        path: `CHAT` or `COMPLETIONS`.
        annotations: Takes the values of the events that the frontend sends before the chunks.

    Yields:
        OpenAI's ``chat.completion.chunk``, or the chunk of a completion, as a dict.

    Raises:
        Refused: no chunk has come: a field is refused, or the frontend answers with an error.
        AnswerFailed: the answer ended before its end.
    """
    reading = tool_reading(fields, caller.door.calls)
    stage = None if reading is None or path != CHAT else reading.stage()
    chunks = await ask(caller, fields, path)
    has_begun = False
    try:
        async for chunk in chunks:
            has_begun = True
            if annotations is not None:
                annotations.update(chunks.annotations)
            for each in [chunk] if stage is None else stage.feed(chunk):
                yield each
    except Refused as refused:
        reason = await explained(caller, fields, path, refused)
        raise (AnswerFailed(reason) if has_begun else reason) from None
    finally:
        chunks.close()


def assembled(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that the chunks of a chat put together.

    Args:
        chunks: All chunks, in order; at least one.

    Returns:
        OpenAI's ``chat.completion``.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    extensions: dict[int, Any] = {}
    for chunk in chunks:
        answer.update({name: value for name, value in chunk.items() if name not in ("choices", "usage", "nvext")})
        if chunk.get("usage"):
            answer["usage"] = chunk["usage"]
        for delta in chunk.get("choices") or ():
            _put_together(choices.setdefault(delta["index"], _empty_choice(delta["index"])), delta)
        if chunk.get("nvext"):
            index = chunk["choices"][0]["index"] if chunk.get("choices") else 0
            extensions[index] = joined_nvext(extensions.get(index), chunk["nvext"])
    answer["object"] = "chat.completion"
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer | joined_extensions(extensions, choices)


def joined_extensions(extensions: Mapping[int, Any], choices: Collection[int]) -> dict[str, Any]:
    """The field ``nvext`` of a whole answer; empty if no choice has one.

    Args:
        extensions: ``nvext`` by choice.
        choices: Numbers of all choices.
    """
    if extensions and len(choices) > 1:
        return {"nvext": {"choices": [extensions.get(index) for index in sorted(choices)]}}
    return {"nvext": next(iter(extensions.values()))} if extensions else {}


def _empty_choice(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": None},
        "finish_reason": None,
        "logprobs": None,
    }


def _put_together(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add what a chunk has of one choice."""
    message = choice["message"]
    for name, value in (delta.get("delta") or {}).items():
        if name == "tool_calls":
            for call in value or ():
                _add_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif value is not None:
            message[name] = value
    choice["finish_reason"] = delta.get("finish_reason") or choice["finish_reason"]
    join_returned(choice, delta)
    found = delta.get("logprobs")
    if found:
        so_far = choice["logprobs"] or {"content": [], "refusal": None}
        choice["logprobs"] = {**so_far, "content": so_far["content"] + (found.get("content") or [])}


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    while len(calls) <= delta["index"]:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[delta["index"]]
    call["id"] = delta.get("id") or call["id"]
    function = delta.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
