"""Answers of frontends that are read rather than passed on."""

from __future__ import annotations

from typing import Protocol

import h11

from worker.frontdoor.upstreams import UpstreamConnection


class Whole(Protocol):
    """Answer that is made of several."""

    def headed(self, answer: ParsedAnswer) -> None:
        """The head of an answer has come."""

    def data(self, answer: ParsedAnswer, data: bytes) -> None:
        """Bytes of an answer's body."""

    def ended(self, answer: ParsedAnswer) -> None:
        """An answer is complete."""

    def failed(self, answer: ParsedAnswer, reason: str) -> None:
        """A frontend has gone before the end of its answer."""


class ParsedAnswer:
    """One of several answers that are made into one: its head and its body, as they come.

    Args:
        whole: Receiver of head and body.
        index: Number of the request that it answers.

    Attributes:
        connection: Connection to the frontend that sends it.
        status: HTTP status, 0 before the head.
        headers: Names in lower case.
        num_bytes: Length of `body`.
        collects: Whether it is an error behind the beginning of a stream.
        ended: Whether it is complete, or not wanted any more.
    """

    def __init__(self, whole: Whole, index: int) -> None:
        self.index = index
        self.connection = UpstreamConnection(is_kept=False)  # no such request takes a kept one
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []  # of the body
        self._has_event = False  # an event ends in it
        self.num_bytes = 0
        self.collects = False
        self.ended = False
        self._whole = whole
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method="POST", target="/", headers=[("host", "frontend")]))
        self._parser.send(h11.EndOfMessage())

    @property
    def is_stream(self) -> bool:
        return self.headers.get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def body(self) -> bytes:
        """Bytes of the body so far; of a stream, of the current event."""
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def take(self, data: bytes) -> None:
        """Add the next bytes to the body."""
        last = self._parts[-1][-1:] if self._parts else b""
        self._has_event = self._has_event or b"\n\n" in last + data
        self._parts.append(data)
        self.num_bytes += len(data)

    def taken_events(self) -> list[bytes]:
        """The events of a stream that are complete, taken out of the body."""
        if not self._has_event:
            return []
        *events, rest = self.body.split(b"\n\n")
        self._parts, self.num_bytes, self._has_event = [rest] if rest else [], len(rest), False
        return events

    def received(self, data: bytes) -> None:
        """Bytes of the answer."""
        self._parser.receive_data(data)
        self._read()

    def answered(self, closes: bool) -> None:
        """The answer is complete; ``closes``: its end is that of the connection."""
        if closes:
            self._parser.receive_data(b"")
            self._read()
        self._whole.ended(self)

    def failed(self, begun: bool, reason: str) -> None:
        """The frontend has gone before the end of the answer."""
        self._whole.failed(self, reason)

    def _read(self) -> None:
        try:
            while True:
                event = self._parser.next_event()
                if isinstance(event, h11.Response):
                    self.status, self.headers = event.status_code, dict(event.headers)
                    self._whole.headed(self)
                elif isinstance(event, h11.Data):
                    self._whole.data(self, bytes(event.data))
                elif not isinstance(event, h11.InformationalResponse):
                    return
        except h11.RemoteProtocolError as error:
            self._whole.failed(self, str(error))
