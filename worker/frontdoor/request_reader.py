"""A client's request from its bytes.

h11 reads it, except for a head that is as plain as those of all clients that are not tests of HTTP
servers: that one is recognized here, in a sixth of the time. What h11 would refuse is never plain.
"""

from __future__ import annotations

import re
import string
from typing import NamedTuple

import h11

from worker.frontdoor.errors import Refused
from worker.frontdoor.http import HOP_BY_HOP, MAX_HEAD

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[\x21-\x7e]*) HTTP/1\.1")
_IN_NAMES = b"!#$%&'*+-.^_`|~" + string.digits.encode() + string.ascii_letters.encode()
_IN_LINES = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
_LENGTH = re.compile(rb"[0-9]{1,15}")
_NOT_PLAIN = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
_ONCE = frozenset((b"host", b"content-length"))

NO_HEADERS: frozenset[bytes] = frozenset()


class Head(NamedTuple):
    """The head of a request.

    Attributes:
        method: In capitals.
        target: As it was sent.
        version: ``1.1`` or ``1.0``.
        lines: Names, as they were written, and values of its headers.
        headers: The values by name in lower case; of several the last.
    """

    method: bytes
    target: bytes
    version: bytes
    lines: list[tuple[bytes, bytes]]
    headers: dict[bytes, bytes]

    def sent_on(self, num_bytes: int | None, close: bool, without: frozenset[bytes] = NO_HEADERS) -> bytes:
        """The head to send to a frontend, with the client's headers but those of one connection.

        Args:
            num_bytes: Length of the body, None if it has none.
            close: Whether the frontend shall close the connection after its answer, and say so.
            without: Headers to leave out, in lower case.
        """
        named = self.headers.get(b"connection")
        dropped = HOP_BY_HOP if named is None else HOP_BY_HOP | {each.strip().lower() for each in named.split(b",")}
        if without:
            dropped |= without
        parts = [b"%b %b HTTP/%b" % (self.method, self.target, self.version)]
        parts += [b": ".join(line) for line in self.lines if line[0].lower() not in dropped]
        if num_bytes is not None:
            parts.append(b"content-length: %d" % num_bytes)
        if close:
            parts.append(b"connection: close")
        parts.append(b"\r\n")
        return b"\r\n".join(parts)


def plain_head(data: bytes) -> tuple[Head, int] | None:
    """The plain head at the beginning of ``data`` and its length in bytes, or None.

    Plain is HTTP/1.1 with a path as its target, one Host, at most one Content-Length, and neither
    Transfer-Encoding nor Expect nor Upgrade.
    """
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        return None
    head = data[:end]
    first, *rest = head.split(b"\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    if request is None or request[1] == b"CONNECT" or head.translate(None, _IN_LINES) != b"\r\n" * len(rest):
        return None
    lines, headers = [], {}
    for line in rest:
        name, colon, value = line.partition(b":")
        if not (name and colon):
            return None
        value = value.strip(b"\t ")
        lines.append((name, value))
        headers[name.lower()] = value
    if b"".join(headers).translate(None, _IN_NAMES):
        return None
    if len(headers) < len(lines) and any(_occurrences(lines, name) > 1 for name in _ONCE):
        return None
    if b"host" not in headers or not _NOT_PLAIN.isdisjoint(headers):
        return None
    if not _LENGTH.fullmatch(headers.get(b"content-length", b"0")):
        return None
    return Head(request[1], request[2], b"1.1", lines, headers), end + 4


def _occurrences(lines: list[tuple[bytes, bytes]], name: bytes) -> int:
    return [each.lower() for each, _ in lines].count(name)


class RequestReader:
    """Reads one request."""

    END = b""
    """What `next` returns behind the last part of the body; no part is empty."""

    def __init__(self) -> None:
        self._pending = b""
        self._left: int | None = None  # bytes to come of the body of a plain request
        self._parser: h11.Connection | None = None  # reads one that is not plain

    @property
    def trailing(self) -> bytes:
        """What follows the request, once `next` has returned `END`."""
        return self._pending if self._parser is None else self._parser.trailing_data[0]

    @property
    def awaits_continue(self) -> bool:
        """Whether the client sends its body only after a 100."""
        return self._parser is not None and self._parser.they_are_waiting_for_100_continue

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._parser is not None:
            self._parser.receive_data(data)
        else:
            self._pending = self._pending + data if self._pending else data

    def next(self) -> Head | bytes | None:
        """The head, then the parts of the body, then `END`; None if more bytes are needed.

        Raises:
            Refused: this is not HTTP/1.1 as it should be.
        """
        if self._parser is not None:
            return self._of_h11(self._parser)
        if self._left is None:
            return self._first() if self._pending else None
        if self._left == 0:
            return self.END
        if not self._pending:
            return None
        part, self._pending = self._pending[: self._left], self._pending[self._left :]
        self._left -= len(part)
        return part

    def _first(self) -> Head | bytes | None:
        plain = plain_head(self._pending)
        if plain is None:
            self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
            self.feed(self._pending)
            return self._of_h11(self._parser)
        head, length = plain
        self._pending = self._pending[length:]
        self._left = int(head.headers.get(b"content-length", b"0"))
        return head

    def _of_h11(self, parser: h11.Connection) -> Head | bytes | None:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError as error:
            problem = f"this is not HTTP/1.1 as it should be: {error}"
            raise Refused(error.error_status_hint, problem) from None
        if isinstance(event, h11.Request):
            lines = [(bytes(name), bytes(value)) for name, value in event.headers.raw_items()]
            return Head(event.method, event.target, event.http_version, lines, dict(event.headers))
        if isinstance(event, h11.Data):
            return bytes(event.data) or self._of_h11(parser)
        return self.END if isinstance(event, h11.EndOfMessage) else None
