"""HTTP/1.1 of answers: the front door's own, and the end of one whose bytes are passed on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

_STATUS, _LENGTH, _CHUNK_SIZE = re.compile(rb"[0-9]{3}"), re.compile(rb"[0-9]{1,15}"), re.compile(rb"[0-9A-Fa-f]{1,15}")

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"content-length",
        b"expect",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that are not sent on; the length is the front door's own."""

MAX_HEAD = 64 * 1024
"""Largest head of a request or an answer, in bytes."""

_FRAMING = re.compile(rb"\r\n[\t ]*(connection|content-length|content-type|transfer-encoding)[\t ]*:([^\r\n]*)")
"""The headers of an answer, in lower case, that say where it ends, and whether it is a stream."""

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Before the head of an answer clients leave it out of account (RFC 9110, 15.2)."""

COMMENT = b":\n\n"
"""An event that clients leave out of account, between the events of a stream."""


class BadAnswer(Exception):
    """A frontend's answer is not HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a path that the front door answers itself.

    Attributes:
        content_type: Value of that header.
        body: Bytes of the content.
        headers: Further header lines, each with its CRLF.
    """

    content_type: bytes
    body: bytes
    headers: bytes = b""


_PHRASES = {each.value: each.phrase.encode() for each in HTTPStatus} | {529: b"Overloaded"}
"""Reason phrases by status; 529 is the one of Dynamo and Anthropic for a full queue."""


def answer(
    status: int,
    body: bytes,
    *,
    keep_alive: bool,
    head_only: bool = False,
    content_type: bytes = b"application/json",
    headers: bytes = b"",
) -> bytes:
    """A whole answer; ``headers`` are further lines, each with its CRLF."""
    head = (
        b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n"
    ) % (
        status,
        _PHRASES.get(status, b""),
        content_type,
        len(body),
        headers,
        b"" if keep_alive else b"connection: close\r\n",
    )  # fmt: skip
    return head if head_only else head + body


def chunk(data: bytes) -> bytes:
    """A chunk of a body; nothing for no data, since an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def stream_head(content_type: bytes, headers: bytes, *, chunked: bool) -> bytes:
    """The head of an answer of unknown length.

    Args:
        content_type: Value of that header.
        headers: Further header lines, each with its CRLF.
        chunked: Whether the body comes in chunks; else it ends with the connection.
    """
    framing = b"transfer-encoding: chunked" if chunked else b"connection: close"
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\n%b%b\r\n\r\n" % (
        content_type,
        headers,
        framing,
    )


class AnswerEnd:
    """Finder of an answer's end in its bytes, which stay unchanged.

    Args:
        head_only: Whether the request was a HEAD.
    """

    def __init__(self, head_only: bool = False) -> None:
        self._head_only = head_only
        self._head: bytes | None = b""
        self._remaining: int | None = None  # of a body with a length, or of a chunk with its CRLF
        self._chunked = False
        self._line = b""
        self._trailers = False
        self._stays = False
        self._is_stream = False
        self._has_body = False
        self._last = b""
        self.complete = False

    @property
    def begun(self) -> bool:
        """Whether the head has been read."""
        return self._head is None

    @property
    def until_close(self) -> bool:
        """Whether the answer ends with the connection."""
        return self.begun and not self._chunked and self._remaining is None

    @property
    def stays_open(self) -> bool:
        """Whether the connection may carry another answer after this one."""
        return self.complete and self._stays

    @property
    def is_between_events(self) -> bool:
        """Whether this is a stream in chunks, and what has come of it ends with an event, or with
        its head.
        """
        if not (self._is_stream and self._chunked) or self._line or self._remaining or self._trailers:
            return False
        return not self._has_body or self._last.endswith(b"\n\n\r\n")

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises `BadAnswer`."""
        self._last = data
        while self._head is not None and data:
            data = self._feed_head(data)
        if not data:
            return
        if self.complete:
            raise BadAnswer("bytes after the end of the answer")
        if self._chunked:
            self._feed_chunks(data)
        elif self._remaining is not None:
            self._remaining -= len(data)
            if self._remaining < 0:
                raise BadAnswer("a body beyond its length")
            self.complete = self._remaining == 0

    def _feed_head(self, data: bytes) -> bytes:
        """The bytes after the head, if it ends in ``data``."""
        assert self._head is not None
        head, end, rest = (self._head + data).partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD:
            raise BadAnswer("a head beyond its limit")
        if not end:
            self._head = head
            return b""
        words = head.partition(b"\r\n")[0].split(b" ", 2)
        if not words[0].startswith(b"HTTP/1.") or len(words) < 2 or not _STATUS.fullmatch(words[1]):
            raise BadAnswer("no status line")
        status = int(words[1])
        if 100 <= status < 200:
            self._head = b""  # the answer proper is still to come
            return rest
        self._head = None
        self._stays = words[0] == b"HTTP/1.1"
        self._begin_body(status, _FRAMING.findall(head.lower()))
        return rest

    def _begin_body(self, status: int, framing: list[tuple[bytes, bytes]]) -> None:
        headers = dict(framing)
        self._is_stream = headers.get(b"content-type", b"").strip().startswith(b"text/event-stream")
        if any(name == b"connection" and b"close" in value for name, value in framing):
            self._stays = False
        if self._head_only or status in (204, 304):
            self._remaining, self.complete = 0, True
        elif b"chunked" in headers.get(b"transfer-encoding", b""):
            self._chunked, self._remaining = True, 0
        elif b"content-length" in headers:
            length = headers[b"content-length"].strip()
            if not _LENGTH.fullmatch(length):
                raise BadAnswer("a length that is no number")
            self._remaining = int(length)
            self.complete = self._remaining == 0

    def _feed_chunks(self, data: bytes) -> None:
        """Step from the head of a chunk to the next one, over what is between them."""
        assert self._remaining is not None
        self._has_body = True
        position, end = self._remaining, len(data)
        while position < end:
            newline = data.find(b"\n", position)
            if newline < 0:
                self._line += data[position:]
                if len(self._line) > MAX_HEAD:
                    raise BadAnswer("a chunk's head beyond its limit")
                position = end
                break
            line = self._line + data[position:newline]
            self._line, position = b"", newline + 1
            if self._trailers:
                if line in (b"", b"\r"):
                    self.complete = True
                    if position < end:
                        raise BadAnswer("bytes after the end of the answer")
                continue
            written = line.partition(b";")[0].strip()
            if not _CHUNK_SIZE.fullmatch(written):  # int() takes more, such as a sign
                raise BadAnswer("a chunk without its size")
            size = int(written, 16)
            self._trailers = size == 0
            position += size + 2 if size else 0
        self._remaining = position - end
