"""Answers of chat and completions, whole and streamed: JSON data with what is read most often."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_logits_client.errors import AnswerFailed, error_of
from dynamo_logits_client.events import Event, EventReader
from dynamo_logits_client.receipts import Receipt, choice_of, receipt_of, receipts_of


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        data: ``chat.completion`` or ``text_completion`` as it came.
    """

    data: Mapping[str, Any]

    @property
    def texts(self) -> list[str]:
        """The text of each choice; empty where it has none, as beside tool calls."""
        return [(each["message"].get("content") if "message" in each else each["text"]) or "" for each in self.choices]

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self.texts[0]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices, in the order of their indices."""
        return sorted(self.data["choices"], key=lambda each: int(each["index"]))

    @property
    def receipts(self) -> tuple[Receipt | None, ...]:
        """The receipt of each choice; empty if none was asked for."""
        return receipts_of(self.data)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of choice 0."""
        return receipt_of(self.data)


@dataclass(frozen=True)
class Chunk:
    """One piece of a streamed answer.

    Attributes:
        data: ``chat.completion.chunk`` or ``text_completion`` as it came.
    """

    data: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The piece of text, of whichever choice it is; empty in a chunk without one."""
        choices = self.data["choices"]
        if not choices:
            return ""
        return (choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0]["text"]) or ""

    @property
    def choice(self) -> int:
        """Index of the choice that the piece belongs to."""
        return choice_of(self.data)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of what has been sent of the choice so far."""
        return receipt_of(self.data)


class StreamReader:
    """Chunks of a streamed answer, from the bytes of its body in any pieces.

    Attributes:
        texts: Text of each choice so far.
        receipts: Last receipt of each choice.
        prompt_token_ids: Token ids of the prompt, which come first where ``nvext.annotations`` has
            ``token_ids``; None without.
        usage: Usage, which comes last where ``stream_options`` asks for it; None without.
        is_done: Whether the answer has ended as it should.
    """

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.receipts: dict[int, Receipt] = {}
        self.prompt_token_ids: list[int] | None = None
        self.usage: Mapping[str, Any] | None = None
        self.is_done = False
        self._events = EventReader()

    def feed(self, piece: bytes) -> list[Chunk]:
        """The chunks that end in this piece.

        Raises:
            AnswerFailed: the piece has an error.
        """
        return list(self.chunks(piece))

    def chunks(self, piece: bytes) -> Iterator[Chunk]:
        """The chunks of `feed`, one by one: those before an error come before it is raised."""
        for event in self._events.feed(piece):
            chunk = self._take(event)
            if chunk is not None:
                yield chunk

    def end(self) -> None:
        """Note the end of the body.

        Raises:
            AnswerFailed: the answer has not ended.
        """
        if not self.is_done:
            raise AnswerFailed("the stream ended before the answer did")

    def _take(self, event: Event) -> Chunk | None:
        if event.name == "error":
            raise AnswerFailed(event.comment or event.data)
        if event.name == "token_ids":
            found = _json_of(event.data or event.comment)
            self.prompt_token_ids = _json_of(found) if isinstance(found, str) else found
        if event.name or not event.data:
            return None
        if event.data == "[DONE]":
            self.is_done = True
            return None
        data = _json_of(event.data)
        if isinstance(data, dict) and data.get("error") is not None:
            error = error_of(event.data)
            raise AnswerFailed(error["message"], error.get("param"))
        if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
            raise AnswerFailed(f"expected a chunk with choices, got {event.data[:200]}")
        return self._count(Chunk(data))

    def _count(self, chunk: Chunk) -> Chunk:
        self.usage = chunk.data.get("usage") or self.usage
        if chunk.data["choices"]:
            self.texts[chunk.choice] = self.texts.get(chunk.choice, "") + chunk.text
        receipt = chunk.receipt
        if receipt is not None:
            self.receipts[chunk.choice] = receipt
        return chunk


def _json_of(text: str) -> Any:
    """The JSON data of an event. Raises `AnswerFailed`."""
    try:
        return json.loads(text)
    except ValueError:
        raise AnswerFailed(f"expected JSON, got {text[:200]}") from None
