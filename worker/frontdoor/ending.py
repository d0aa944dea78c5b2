"""The end of a stream that is passed on, which is held back where it is an error.

Dynamo's frontend ends a stream that fails once it has begun with an event, and replaces the reason
by a text of its own.
"""

from __future__ import annotations

import re

from worker.frontdoor.errors import Refused
from worker.frontdoor.opening import streamed_error

_ERRORS = (b'\ndata: {"error"', b"\nevent: error")
_SIZE = re.compile(rb"[0-9a-fA-F]+\r")


class Ending:
    """The last events of one answer in chunks, from an error on.

    Attributes:
        held: Bytes that have been held back, none before an error.
    """

    def __init__(self) -> None:
        self.held = b""
        self._at_line = True  # what has come ends with a line

    def take(self, data: bytes) -> bytes:
        """Take the next bytes; returns those that may go on: all before the chunk of an error.

        An event that a read has cut in two goes on unseen.
        """
        if self.held:
            self.held += data
            return b""
        for error in _ERRORS:
            line = data.find(error)
            if line >= 0:
                start = data.rfind(b"\n", 0, line) + 1
                if _SIZE.fullmatch(data, start, line) and (start or self._at_line):
                    self.held = data[start:]
                    return data[:start]
        self._at_line = data.endswith(b"\n")
        return data

    def error(self) -> Refused:
        """The error that is held."""
        return streamed_error(self.held.partition(b"\n")[2])
