"""Chats and completions that the front door asks a frontend for on behalf of a handler.

They are always streamed, and a whole answer is put together of the chunks: streamed or not, an
answer is the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.frontdoor.asking import Caller, ask
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.refusal_reading import explained
from worker.frontdoor.returned_tokens import join_returned, joined_nvext
from worker.frontdoor.tool_reading import ToolReading, reads_schemas, tool_reading


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
        Refused: a field is refused, the frontend answers with an error, or the answer ended before
            its end.
    """
    chunks = await ask(caller, fields, path)
    try:
        reading = await _reading(caller, fields)  # behind all checks: what is refused is not read
        stage = None if reading is None or path != CHAT else reading.stage()
        async for chunk in chunks:
            if annotations is not None:
                annotations.update(chunks.annotations)
            for each in [chunk] if stage is None else stage.feed(chunk):
                yield each
    except Refused as refused:
        raise await explained(caller, fields, path, refused) from None
    finally:
        chunks.close()


async def _reading(caller: Caller, fields: dict[str, Any]) -> ToolReading | None:
    """See `tool_reading`; what takes long is done beside the event loop."""
    read = partial(tool_reading, fields, caller.door.calls)
    if not reads_schemas(fields, caller.door.calls):
        return read()
    return await caller.door.rewriting.aside(caller.request.label, read)


def assembled(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that the chunks of a chat put together.

    Args:
        chunks: All chunks, in order; at least one.

    Returns:
        OpenAI's ``chat.completion``.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, _Choice] = {}
    extensions: dict[int, Any] = {}
    for chunk in chunks:
        answer.update({name: value for name, value in chunk.items() if name not in ("choices", "usage", "nvext")})
        if chunk.get("usage"):
            answer["usage"] = chunk["usage"]
        for delta in chunk.get("choices") or ():
            index = delta["index"]
            if index not in choices:
                choices[index] = _Choice(index)
            choices[index].add(delta)
        if chunk.get("nvext"):
            index = chunk["choices"][0]["index"] if chunk.get("choices") else 0
            extensions[index] = joined_nvext(extensions.get(index), chunk["nvext"])
    answer["object"] = "chat.completion"
    answer["choices"] = [choices[index].whole() for index in sorted(choices)]
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


class _Choice:
    """One choice of an answer, as far as its chunks have come: its texts are joined at the end.

    Args:
        index: Number of the choice.
    """

    def __init__(self, index: int) -> None:
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._texts: dict[str, list[str]] = {}
        self._calls: list[_Call] = []
        self._choice: dict[str, Any] = {
            "index": index,
            "message": self._message,
            "finish_reason": None,
            "logprobs": None,
        }

    def add(self, delta: dict[str, Any]) -> None:
        """Add what a chunk has of the choice."""
        message, choice = self._message, self._choice
        for name, value in (delta.get("delta") or {}).items():
            if name == "tool_calls":
                message.setdefault(name, [])
                for call in value or ():
                    self._add_call(call)
            elif isinstance(value, str) and name != "role":
                message.setdefault(name, "")
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                message[name] = value
        choice["finish_reason"] = delta.get("finish_reason") or choice["finish_reason"]
        join_returned(choice, delta)
        found = delta.get("logprobs")
        if found:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"].extend(found.get("content") or ())

    def _add_call(self, delta: dict[str, Any]) -> None:
        while len(self._calls) <= delta["index"]:
            self._calls.append(_Call())
        call, function = self._calls[delta["index"]], delta.get("function") or {}
        call.id = delta.get("id") or call.id
        call.name.append(function.get("name") or "")
        call.arguments.append(function.get("arguments") or "")

    def whole(self) -> dict[str, Any]:
        """The choice that the chunks put together."""
        self._message.update({name: "".join(texts) for name, texts in self._texts.items()})
        if "tool_calls" in self._message:
            self._message["tool_calls"] = [call.whole() for call in self._calls]
        return self._choice


@dataclass(slots=True)
class _Call:
    """One call of a choice.

    Attributes:
        id: The id of the call, None before it has come.
        name: Parts of the name of the function.
        arguments: Parts of the arguments.
    """

    id: str | None = None
    name: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        """The call."""
        function = {"name": "".join(self.name), "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}
