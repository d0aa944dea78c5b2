"""Server-sent events of a streamed answer, from its bytes in any pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: Name of the event; empty for the chunks of an answer.
        data: Lines of its data, joined.
        comment: Lines of its comments, joined; Dynamo's own events have their value there.
    """

    name: str
    data: str
    comment: str


class EventReader:
    """A parser of ``text/event-stream``."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of the line that has not ended
        self._half = b""  # a carriage return at the end of what has arrived: it may be half of a line end
        self._name = ""
        self._data: list[str] = []
        self._comments: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that end in this piece of the body."""
        text = self._half + piece
        self._half = b"\r" if text.endswith(b"\r") else b""
        first, *lines = _LINE_END.split(text.removesuffix(b"\r"))
        self._rest.append(first)
        if not lines:
            return []
        *lines, rest = b"".join(self._rest), *lines
        self._rest = [rest]
        return [event for line in lines if (event := self._take(line.decode("utf-8", "replace"))) is not None]

    def _take(self, line: str) -> Event | None:
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
            elif not field:
                self._comments.append(value)
            return None
        event = Event(self._name, "\n".join(self._data), "\n".join(self._comments))
        self._name, self._data, self._comments = "", [], []
        return event if event.name or event.data else None
