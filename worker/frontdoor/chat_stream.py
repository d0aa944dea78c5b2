"""Chats and completions that the front door asks a frontend for on behalf of a handler.

They are always streamed, and a whole answer is put together of the chunks: streamed or not, an
answer is the same.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Any, Protocol

from worker.frontdoor.chunks import Chunks
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.request_intake import AdmittedRequest
from worker.frontdoor.requests import TOO_DEEP
from worker.frontdoor.rewriting import AT_ONCE
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.tool_reading import tool_reading

_LOST = "Internal server error"
"""Message that Dynamo's frontend 1.4.2 puts in the place of that of a refusal, in a stream."""


class Caller(Protocol):
    """Requester on whose behalf a frontend is asked: an `Exchange`, or a batch.

    Attributes:
        door: State that all connections share.
        request: The request whose headers are sent on.
    """

    door: FrontDoor
    request: AdmittedRequest


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
        if has_begun:
            raise AnswerFailed(refused) from None
        raise await with_message(caller, fields, path, refused) from None
    finally:
        chunks.close()


async def ask(caller: Caller, fields: dict[str, Any], path: str = CHAT) -> Chunks:
    """Send a chat or completion to a frontend, after all checks; the caller closes the chunks.

    Raises:
        Refused: a field is refused.
    """
    options = fields.get("stream_options")
    if options is None or isinstance(options, dict):  # otherwise it is refused
        options = {**(options or {}), "include_usage": True}
    streamed = {**fields, "stream": True, "stream_options": options}
    return Chunks(caller.door.upstreams, caller.request.translated(path, await _bodies(caller, streamed, path)))


async def _bodies(caller: Caller, fields: dict[str, Any], path: str) -> tuple[bytes, ...]:
    """The bodies of the requests for each choice. Raises `Refused`."""
    try:
        # `fields` may be large, and are changed
        text = json.dumps(fields).encode()
        if len(text) <= AT_ONCE:
            return caller.door.rewrite_fields(path, json.loads(text), caller.request.head)
        return await caller.door.rewriting.aside(
            lambda: caller.door.rewrite_fields(path, json.loads(text), caller.request.head)
        )
    except RecursionError:
        raise Refused(400, TOO_DEEP) from None


async def with_message(caller: Caller, fields: dict[str, Any], path: str, refused: Refused) -> Refused:
    """The error of a request to `ask`, with the worker's message where the frontend leaves it out.

    1.4.2 has the message in answers that are not streamed, and without tools. A request that is
    refused computes nothing, so that it can be asked again, with its own limits.

    Args:
        caller: Requester on whose behalf the frontend was asked.
        fields: Fields of the request.
        path: `CHAT` or `COMPLETIONS`.
        refused: Error that the frontend answered with.
    """
    if refused.status != 500 or refused.message != _LOST:
        return refused
    again = {name: value for name, value in fields.items() if name not in ("stream_options", "n")}
    again["stream"] = False
    bodies = await _bodies(caller, again, path)
    chunks = Chunks(caller.door.upstreams, caller.request.translated(path, [_without_tools(bodies[0])]))
    try:
        async for _ in chunks:
            break
    except Refused as found:
        return found if 400 <= found.status < 500 else refused
    finally:
        chunks.close()
    return refused


def _without_tools(body: bytes) -> bytes:
    fields = json.loads(body)
    return json.dumps({name: fields[name] for name in fields if name not in ("tools", "tool_choice")}).encode()


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
            extensions[index] = {**extensions.get(index, {}), **chunk["nvext"]}
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
