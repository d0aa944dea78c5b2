"""Items of a Responses request as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.responses.items import PICTURE, Item, PlacedItem, text_of
from worker.frontdoor.values import printable
from worker.runtimes.direct.pictures import PART

Message = dict[str, Any]


class Messages:
    """The messages of a chat, and which item each part of them is made of.

    An assistant's turn, which is one message of a chat, is several items: its reasoning, its text
    and its calls. System messages at the beginning become one, because many chat templates take no
    second one.

    Attributes:
        messages: The messages.
        origins: Path in the chat request → path in the client's request.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: dict[str, str] = {}
        self._call_ids: set[str] = set()
        self._texts: dict[tuple[int, str], list[str]] = {}  # by message and key: texts that are not joined yet

    def add_instructions(self, text: str) -> None:
        """Add the field ``instructions``."""
        self._begin("instructions", {"role": "system", "content": text})
        self.origins[f"{self._last_path}.content"] = "instructions"

    def add_items(self, items: Iterable[PlacedItem]) -> None:
        """Add items.

        Raises:
            FieldRefused: the result of a call has no call before it.
        """
        for placed in items:
            kind = placed.item["type"]
            if kind == "function_call":
                self._add_call(placed)
            elif kind == "function_call_output":
                self._add_output(placed)
            elif kind == "reasoning":
                self._add_reasoning(placed)
            elif placed.item["role"] == "assistant":
                self._add_answer(placed)
            else:
                self._add_message(placed)
        for (index, key), texts in self._texts.items():
            self.messages[index][key] = "\n\n".join(filter(None, texts))
        self._texts.clear()

    def _add_texts(self, key: str, texts: Iterable[str]) -> None:
        """Add texts to one of the last message. They are joined at the end of all items: with each
        of many items that would copy all texts before it.
        """
        message = self.messages[-1]
        known = self._texts.setdefault((len(self.messages) - 1, key), [message.setdefault(key, "")])
        known += texts

    @property
    def _last_path(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def _begin(self, path: str, message: Message) -> Message:
        self.messages.append(message)
        self.origins[self._last_path] = path
        return message

    def _add_message(self, placed: PlacedItem) -> None:
        role = "system" if placed.item["role"] == "developer" else placed.item["role"]
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self._add_texts("content", map(text_of, placed.item["content"]))
            return
        is_first_system = role == "system" and not self.messages
        self._begin(placed.path, {"role": role, "content": self._content(placed, joined=is_first_system)})

    def _content(self, placed: PlacedItem, *, joined: bool = False) -> str | list[Item]:
        """The content of a message that is about to be added: a text if it has one part that is
        one.
        """
        parts = placed.item["content"]
        path = f"messages[{len(self.messages)}].content"
        self.origins[path] = f"{placed.path}.content" if placed.path.startswith("input[") else placed.path
        is_text = len(parts) == 1 and parts[0]["type"] != PICTURE
        if is_text or joined:
            if is_text and placed.path.startswith("input[") and not placed.whole:
                self.origins[path] += "[0]"
            return "\n\n".join(map(text_of, parts))
        return [self._part(placed, i, part) for i, part in enumerate(parts)]

    def _part(self, placed: PlacedItem, place: int, part: Item) -> Item:
        """A part of the content of a message that is about to be added."""
        if part["type"] != PICTURE:
            return {"type": "text", "text": text_of(part)}
        mine = f"messages[{len(self.messages)}].content[{place}].{PART}"
        is_given = placed.path.startswith("input[")
        theirs = f"{placed.path}.content[{place}]" if is_given else placed.path
        for key, name in {"": ".image_url", ".url": ".image_url", ".detail": ".detail"}.items():
            self.origins[mine + key] = theirs + name if is_given else theirs
        return {"type": "image_url", PART: {"url": part["image_url"], "detail": part["detail"]}}

    def _turn(self, placed: PlacedItem, filled: tuple[str, ...]) -> Message:
        """The assistant's message that an item joins: the last one, unless it has a later part of
        a turn already.
        """
        if self.messages and self.messages[-1]["role"] == "assistant":
            last = self.messages[-1]
            if not any(key in last for key in filled):
                return last
        return self._begin(placed.path, {"role": "assistant"})

    def _add_reasoning(self, placed: PlacedItem) -> None:
        parts = placed.item.get("content") or placed.item["summary"]
        text = "\n\n".join(part["text"] for part in parts)
        if not text:  # what clients send back that keep no reasoning
            return
        self._turn(placed, ("content", "tool_calls"))
        self._add_texts("reasoning_content", (text,))
        self.origins[f"{self._last_path}.reasoning_content"] = placed.path

    def _add_answer(self, placed: PlacedItem) -> None:
        turn = self._turn(placed, ("content", "tool_calls"))
        turn["content"] = "".join(map(text_of, placed.item["content"]))
        self.origins[f"{self._last_path}.content"] = placed.path

    def _add_call(self, placed: PlacedItem) -> None:
        call = placed.item
        turn = self._turn(placed, ())
        calls = turn.setdefault("tool_calls", [])
        path = f"{self._last_path}.tool_calls[{len(calls)}]"
        self.origins[path] = placed.path
        self.origins[f"{path}.id"] = f"{placed.path}.call_id"
        self.origins[f"{path}.function"] = placed.path
        function = {"name": call["name"], "arguments": call["arguments"]}
        calls.append({"id": call["call_id"], "type": "function", "function": function})
        self._call_ids.add(call["call_id"])

    def _add_output(self, placed: PlacedItem) -> None:
        call_id, output = placed.item["call_id"], placed.item["output"]
        if call_id not in self._call_ids:
            raise FieldRefused(
                f"{placed.path}.call_id", f"no function_call before it has the call_id {printable(call_id)}"
            )
        text = output if isinstance(output, str) else "\n".join(map(text_of, output))
        self._begin(placed.path, {"role": "tool", "tool_call_id": call_id, "content": text})
        self.origins[f"{self._last_path}.content"] = f"{placed.path}.output"
        self.origins[f"{self._last_path}.tool_call_id"] = f"{placed.path}.call_id"
