"""Server-sent events of a streamed answer, from its bytes in any pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A carriage return at the end of what has arrived may be half of a line end."""


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
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._comments: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that end in this piece of the body."""
        *lines, self._rest = _LINE_END.split(self._rest + piece)
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
