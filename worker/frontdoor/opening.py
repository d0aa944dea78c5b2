"""The beginning of a frontend's answer, which is held back until it is known to be no error.

Dynamo's frontend answers a stream with 200 before it knows whether the worker takes the request,
and says what went wrong as the first event.
"""

from __future__ import annotations

import re

import h11

from worker.frontdoor.errors import Refused, no_answer
from worker.frontdoor.frontend_errors import error_of
from worker.frontdoor.stream_events import StreamEvent

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_EVENT_STREAM = re.compile(rb"\r\ncontent-type: *text/event-stream", re.IGNORECASE)
_COMMENT = re.compile(rb"\A(?:[0-9a-fA-F]+\r\n)?:")
_EVENT = re.compile(rb"(?:\A|\n)(?:data: *(?P<data>[^\n]{0,8})(?P<end>\n?)|(?P<error>event: *error))")
_ERROR = b'{"error"'

MOST_HELD = 2**20
"""Bytes of an answer that are held back at most; those of a longer beginning go on."""


def begins_with_error(body: bytes) -> bool | None:
    """Whether the first event of a stream is an error; None if more of it is needed.

    Events with comments alone, which are a request's annotations, come before it. A comment that
    stands for itself says that the answer is under way.

    Args:
        body: The beginning of the stream; the framing of chunks in it does no harm.
    """
    found = _EVENT.search(body)
    if found is None:
        return False if _COMMENT.match(body) else None
    if found["error"] is not None or found["data"] == _ERROR:
        return True
    return None if _ERROR.startswith(found["data"]) and not found["end"] else False


class Opening:
    """The beginning of one answer.

    Attributes:
        held: Bytes that have been held back.
        is_error: Whether it is an error; then all of it is held.
    """

    def __init__(self) -> None:
        self.held = b""
        self.is_error = False

    def take(self, data: bytes) -> bool:
        """Take the next bytes; whether `held` may go on to the client."""
        self.held += data
        if not self.is_error:
            found = self._found()
            self.is_error = found is True
            return found is False
        return False

    def _found(self) -> bool | None:
        if len(self.held) > MOST_HELD:
            return False
        end = self.held.find(b"\r\n\r\n")
        status = _STATUS.match(self.held)
        if end < 0 or status is None:
            return None
        if int(status[1]) >= 400:
            return True
        return begins_with_error(self.held[end + 4 :]) if _EVENT_STREAM.search(self.held, 0, end) else False

    def error(self) -> Refused:
        """The error that the whole answer is."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "frontend")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(self.held)
        status, body = 502, b""
        try:
            while isinstance(event := parser.next_event(), h11.InformationalResponse | h11.Response | h11.Data):
                if isinstance(event, h11.Data):
                    body += event.data
                else:
                    status = event.status_code
        except h11.RemoteProtocolError as error:
            return no_answer(str(error))
        return error_of(status, body) if status >= 400 else streamed_error(body)


def streamed_error(body: bytes) -> Refused:
    """The error in a stream that begins with one."""
    for event in map(StreamEvent.of, body.split(b"\n\n")):
        if event.data.startswith(_ERROR):
            return error_of(500, event.data)
        if (error := event.named_error) is not None:
            return error
    return no_answer("an event is not in OpenAI's form")
