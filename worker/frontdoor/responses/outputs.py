"""Output items while they are generated, with the events that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from worker.frontdoor.responses.items import Item, new_id

Event = dict[str, Any]
"""An event without its ``sequence_number``."""


class OutputItem(Protocol):
    """An item of an answer.

    Attributes:
        index: Place in the response's output.
    """

    index: int

    def item(self, status: str) -> Item:
        """The item, as far as it has been generated."""

    def begin(self) -> Iterator[Event]:
        """The events of its beginning."""

    def end(self, status: str) -> Iterator[Event]:
        """The events of its end."""


def _added(output: OutputItem, item: Item) -> Event:
    return {"type": "response.output_item.added", "output_index": output.index, "item": item}


def _done(output: OutputItem, status: str) -> Event:
    return {"type": "response.output_item.done", "output_index": output.index, "item": output.item(status)}


class _TextOutput:
    """An item whose content is one part, a text.

    Args:
        index: See `OutputItem`.
    """

    _kind: ClassVar[str]
    _part_kind: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.index = index
        self._id = new_id(self._kind)
        self._texts: list[str] = []

    def item(self, status: str) -> Item:
        """See `OutputItem.item`."""
        return self._item(status, [self._part()])

    def _item(self, status: str, content: list[Item]) -> Item:
        return {"id": self._id, "type": self._kind, "status": status, **self._fields(), "content": content}

    def _fields(self) -> Item:
        """Further fields of the item."""
        return {}

    def _part(self) -> Item:
        return {"type": self._part_kind, "text": "".join(self._texts), **self._part_fields()}

    def _part_fields(self) -> Item:
        """Further fields of the part."""
        return {}

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._id, "output_index": self.index, "content_index": 0}
        return {"type": f"response.{kind}", **place, **fields}

    def _added_text(self, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._event(f"{self._part_kind}.delta", delta=text, **fields)

    def begin(self) -> Iterator[Event]:
        """See `OutputItem.begin`."""
        yield _added(self, self._item("in_progress", []))
        yield self._event("content_part.added", part=self._part())

    def end(self, status: str) -> Iterator[Event]:
        """See `OutputItem.end`."""
        part = self._part()
        said = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._event(f"{self._part_kind}.done", **said)
        yield self._event("content_part.done", part=part)
        yield _done(self, status)


class MessageOutput(_TextOutput):
    """A message of the assistant's, with the log probabilities of its tokens."""

    _kind, _part_kind = "message", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[Item] = []

    def _fields(self) -> Item:
        return {"role": "assistant"}

    def _part_fields(self) -> Item:
        return {"annotations": [], "logprobs": list(self._logprobs)}

    def add(self, text: str, logprobs: Sequence[Item]) -> Iterator[Event]:
        """Add text and the log probabilities of its tokens."""
        self._logprobs += logprobs
        yield self._added_text(text, logprobs=list(logprobs))


class ReasoningOutput(_TextOutput):
    """The reasoning before an answer."""

    _kind, _part_kind = "reasoning", "reasoning_text"

    def _fields(self) -> Item:
        return {"summary": []}

    def add(self, text: str) -> Iterator[Event]:
        """Add text."""
        yield self._added_text(text)


class CallOutput:
    """A call of a function.

    Args:
        index: See `OutputItem`.
        call: The first delta of the call in the chat's answer.
    """

    def __init__(self, index: int, call: Mapping[str, Any]) -> None:
        self.index = index
        self._id = new_id("function_call")
        self._call_id = call.get("id") or new_id("call")
        self._name = (call.get("function") or {}).get("name") or ""
        self._arguments: list[str] = []

    def item(self, status: str) -> Item:
        """See `OutputItem.item`."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._id, "output_index": self.index, **fields}

    def begin(self) -> Iterator[Event]:
        """See `OutputItem.begin`."""
        yield _added(self, self.item("in_progress"))

    def add(self, arguments: str) -> Iterator[Event]:
        """Add a part of the arguments."""
        self._arguments.append(arguments)
        yield self._event("function_call_arguments.delta", delta=arguments)

    def end(self, status: str) -> Iterator[Event]:
        """See `OutputItem.end`."""
        arguments = "".join(self._arguments)
        yield self._event("function_call_arguments.done", name=self._name, arguments=arguments)
        yield _done(self, status)
