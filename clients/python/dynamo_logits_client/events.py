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
        self._half = False  # what has arrived ends with a carriage return: a line feed behind it ends no other line
        self._has_begun = False
        self._name = ""
        self._data: list[str] = []
        self._comments: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that end in this piece of the body."""
        if not piece:
            return []
        text = piece.removeprefix(b"\n") if self._half else piece
        self._half = piece.endswith(b"\r")
        first, *lines = _LINE_END.split(text)
        self._rest.append(first)
        if not lines:
            return []
        *lines, rest = b"".join(self._rest), *lines
        self._rest = [rest]
        return [event for line in lines if (event := self._take(self._decoded(line))) is not None]

    def _decoded(self, line: bytes) -> str:
        """A line as text; the first one of the body without a byte order mark."""
        text = line.decode("utf-8", "replace")
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\ufeff")
        return text

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
