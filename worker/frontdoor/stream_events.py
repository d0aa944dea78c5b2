"""Events of a frontend's stream, as they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass

from worker.frontdoor.errors import Refused
from worker.frontdoor.frontend_errors import error_of


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A server-sent event.

    Attributes:
        name: Value of its ``event``, empty without one.
        data: Lines of its ``data``.
        comment: Lines of its comment, in which Dynamo writes an annotation's value, or an error.
    """

    name: str
    data: bytes
    comment: bytes

    @classmethod
    def of(cls, text: bytes) -> StreamEvent:
        """The event of this text, which ends before the empty line."""
        found: dict[bytes, list[bytes]] = {b"event": [], b"data": [], b"": []}
        for line in text.split(b"\n"):
            field, colon, value = line.partition(b":")
            if colon and field in found:
                found[field].append(value.strip())
        name, *_ = *found[b"event"], b""
        return cls(name.decode(errors="replace"), b"\n".join(found[b"data"]), b"\n".join(found[b""]))

    @property
    def named_error(self) -> Refused | None:
        """The error that an event of this name is: its data, or its comment, which
        is a text, JSON, or one of these as a JSON string. None for an event of another name.
        """
        if self.name != "error":
            return None
        try:
            found = json.loads(self.comment)
        except ValueError:
            found = None
        return error_of(500, self.data or (found.encode() if isinstance(found, str) else self.comment))
