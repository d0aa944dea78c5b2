"""A client's request from its bytes, the same however they are cut into pieces.

Each decision is made at one byte of the request: what comes before it is all that counts. What is
accepted here h11 reads alike (a test compares the two); what two servers may read in two ways is
refused: a line that ends with a bare LF, a folded one, a control character, a second length.
"""

from __future__ import annotations

import re
import string
from typing import NamedTuple

from worker.frontdoor.errors import Refused
from worker.frontdoor.http import HOP_BY_HOP, MAX_HEAD
from worker.requests.client import METADATA_KEY

_TOKEN = b"!#$%&'*+-.^_`|~" + string.digits.encode() + string.ascii_letters.encode()
_REQUEST_LINE = re.compile(rb"([%b]+) ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])" % re.escape(_TOKEN))
_IN_LINES = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_ONCE = (b"host", b"content-length", b"transfer-encoding")

MAX_CHUNK_LINE = 4096
"""Longest line before a chunk of a body, its extensions and CRLF among it, in bytes."""

MAX_CHUNKS = 8192
"""Chunks that a body may come in: a large one byte by byte would keep the event loop busy."""

BYTES_PER_CHUNK = 1024
"""Bytes that the chunks of a large upload must have on the whole."""

NO_HEADERS: frozenset[bytes] = frozenset()

CLIENT_HEADER = b"x-dynamo-meta-" + METADATA_KEY.encode()
"""The header in which a client's label goes to the workers. Whatever a client sends there is left
out.
"""

_DROPPED = HOP_BY_HOP | {CLIENT_HEADER}
_END_TO_END = frozenset((b"host", b"authorization", b"content-type", b"traceparent", b"tracestate", b"baggage"))
_END_TO_END_PREFIXES = (b"x-dynamo-", b"x-tenant-", b"x-request-id")
_BAD = "this is not HTTP/1.1 as it should be: "


class Head(NamedTuple):
    """The head of a request.

    Attributes:
        method: Bytes of the method.
        target: Bytes of the target, not decoded.
        version: ``1.1`` or ``1.0``.
        lines: Names, as they were written, and values of its headers.
        headers: The values by name in lower case; of several the last.
        connection: The options that all ``Connection`` lines name, in lower case.
    """

    method: bytes
    target: bytes
    version: bytes
    lines: list[tuple[bytes, bytes]]
    headers: dict[bytes, bytes]
    connection: frozenset[bytes] = NO_HEADERS

    def values(self, name: bytes) -> list[bytes]:
        """The values of all lines of a header, by its name in lower case."""
        if name not in self.headers:
            return []
        return [value for each, value in self.lines if each.lower() == name]

    @property
    def is_chunked(self) -> bool:
        return b"transfer-encoding" in self.headers

    @property
    def may_stay_open(self) -> bool:
        """Whether the client's connection may carry another request: not behind a body with two
        framings, of which another server may have taken the other one.
        """
        two_framings = self.is_chunked and b"content-length" in self.headers
        return self.version == b"1.1" and not two_framings and b"close" not in self.connection

    @property
    def awaits_continue(self) -> bool:
        """Whether the client sends its body only after a 100."""
        return self.version == b"1.1" and self.headers.get(b"expect", b"").lower() == b"100-continue"

    @property
    def num_bytes(self) -> int:
        """Length that the head states for the body; 0 for one in chunks."""
        return 0 if self.is_chunked else int(self.headers.get(b"content-length", b"0"))

    def check_connection_options(self) -> None:
        """Raises `Refused` (400) if ``Connection`` names a header that is meant for what is behind:
        a proxy would have to take it out, and with it what the request asks for.
        """
        for option in self.connection:
            if option in self.headers and (option in _END_TO_END or option.startswith(_END_TO_END_PREFIXES)):
                name = option.decode("latin-1")
                raise Refused(400, f"connection: {name} is no header of one connection", "connection")

    def translated(self, target: bytes) -> Head:
        """The head of a request with a JSON body that is made of this one, for another target: it
        has the headers of this one that have a meaning behind the front door.
        """
        kept = [(name, value) for name, value in self.lines if _is_kept(name.lower())]
        lines = [*kept, (b"content-type", b"application/json")]
        return Head(b"POST", target, b"1.1", lines, {name.lower(): value for name, value in lines})

    def sent_on(
        self, num_bytes: int | None, close: bool, without: frozenset[bytes] = NO_HEADERS, added: bytes = b""
    ) -> bytes:
        """The head to send to a frontend, with the client's headers but those of one connection.

        Args:
            num_bytes: Length of the body, None if it has none.
            close: Whether the frontend shall close the connection after its answer, and say so.
            without: Headers to leave out, in lower case.
            added: Further header lines, each with its CRLF.
        """
        dropped = _DROPPED | without if without else _DROPPED
        if not self.connection.isdisjoint(self.headers):
            dropped |= self.connection
        parts = [b"%b %b HTTP/%b" % (self.method, self.target, self.version)]
        parts += [b": ".join(line) for line in self.lines if line[0].lower() not in dropped]
        if num_bytes is not None:
            parts.append(b"content-length: %d" % num_bytes)
        if close:
            parts.append(b"connection: close")
        parts.append(added + b"\r\n")
        return b"\r\n".join(parts)


def _is_kept(name: bytes) -> bool:
    return (name in _END_TO_END and name != b"content-type") or name.startswith(_END_TO_END_PREFIXES)


def read_head(head: bytes) -> Head:
    """The head that ``head`` is, without the empty line behind it.

    Raises:
        Refused: 400, it is not as it should be; 501 for another transfer coding than chunked, 505
            for another version than 1.0 and 1.1.
    """
    first, *rest = head.split(b"\r\n")
    if head.translate(None, _IN_LINES) != b"\r\n" * len(rest):
        _check_lines(head)
        raise Refused(400, _BAD + "a control character in the head")
    request = _REQUEST_LINE.fullmatch(first)
    if request is None:
        raise Refused(400, _BAD + "no request line")
    method, target, version = request.groups()
    if version not in (b"1.1", b"1.0"):
        raise Refused(505, f"HTTP/{version.decode()} is not supported")
    lines, headers = [], {}
    for line in rest:
        name, colon, value = line.partition(b":")
        if not (colon and name):
            raise _bad_line(line)
        value = value.strip(b"\t ")
        lines.append((name, value))
        headers[name.lower()] = value
    if b"".join(headers).translate(None, _TOKEN):
        raise _bad_line(next(line for line in rest if line.partition(b":")[0].translate(None, _TOKEN)))
    options = NO_HEADERS
    if b"connection" in headers:
        listed = [headers[b"connection"]]
        if len(headers) < len(lines):
            listed = [value for name, value in lines if name.lower() == b"connection"]
        options = frozenset(option.strip(b"\t ") for option in b",".join(listed).lower().split(b","))
    found = Head(method, target, version, lines, headers, options)
    _check_framing(found)
    return found


def _check_lines(head: bytes) -> None:
    """Raises `Refused` (400) if a line of ``head`` ends with LF alone."""
    if head.count(b"\n") != head.count(b"\r\n"):
        raise Refused(400, _BAD + "a bare LF")


def _bad_line(line: bytes) -> Refused:
    return Refused(400, _BAD + ("a folded line" if line[:1] in (b" ", b"\t") else "a header without a name"))


def _check_framing(head: Head) -> None:
    if len(head.headers) < len(head.lines):
        for name in _ONCE:
            if len(head.values(name)) > 1:
                raise Refused(400, f"{_BAD}{name.decode()} comes twice")
    if head.version == b"1.1" and b"host" not in head.headers:
        raise Refused(400, _BAD + "no host")
    if not _LENGTH.fullmatch(head.headers.get(b"content-length", b"0")):
        raise Refused(400, _BAD + "a length that is no number")
    coding = head.headers.get(b"transfer-encoding")
    if coding is None:
        return
    if head.version == b"1.0":
        raise Refused(400, _BAD + "a transfer coding in HTTP/1.0")
    if coding.lower() != b"chunked":
        raise Refused(501, "the only transfer coding that is supported is chunked")


class RequestReader:
    """Reads one request.

    Args:
        max_body: Bytes that a body in chunks may have; a stated length is the caller's to check.
    """

    END = b""
    """Result of `next` behind the last part of the body; no part is empty."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._pending = b""
        self._position = 0  # in what is pending; what is before it has been read
        self._looked_at = 0  # bytes of the head
        self._left: int | None = None  # bytes to come of the body, or of a chunk; None before the head
        self._chunks: _Chunks | None = None

    @property
    def trailing(self) -> bytes:
        """Bytes behind the request, once `next` has returned `END`."""
        return self._pending[self._position :]

    @property
    def num_pending(self) -> int:
        """Bytes that have come and have not been read."""
        return len(self._pending) - self._position

    def allow(self, max_body: int) -> None:
        """Have the body be larger; between its head and its first part."""
        if self._chunks is not None:
            self._chunks.allow(max_body)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._pending = self.trailing + data if self._pending else data
        self._position = 0

    def next(self) -> Head | bytes | None:
        """The head, then the parts of the body, then `END`; None if more bytes are needed.

        Raises:
            Refused: 400 or 431, this is not HTTP/1.1 as it should be; 413, a body in chunks is too
                large, or in too many.
        """
        if self._left is None:
            return self._head() if self._pending else None
        if self._left:
            return self._part()
        if self._chunks is None:
            return self.END
        self._position, size = self._chunks.step(self._pending, self._position)
        if size is None:
            return self.END if self._chunks.is_complete else None
        self._left = size
        return self._part()

    def _part(self) -> bytes | None:
        assert self._left is not None
        part = self._pending[self._position : self._position + self._left]
        self._position += len(part)
        self._left -= len(part)
        return part or None

    def _head(self) -> Head | None:
        data = self._pending
        if data[0] <= 0x20:
            raise Refused(400, _BAD + "no request line")
        end = data.find(b"\r\n\r\n", max(0, self._looked_at - 3), MAX_HEAD)
        if end < 0:
            self._check_part(data)
            return None
        head = read_head(data[:end])
        self._position = end + 4
        self._left = head.num_bytes
        if head.is_chunked:
            self._chunks = _Chunks(self._max_body)
        return head

    def _check_part(self, data: bytes) -> None:
        """Refuse the beginning of a head where all of it would be refused for the same."""
        seen = min(len(data), MAX_HEAD)
        _check_lines(data[self._looked_at : seen])
        if len(data) >= MAX_HEAD:
            raise Refused(431, f"the head has more than {MAX_HEAD} bytes")
        self._looked_at = seen - data.endswith(b"\r")


class _Chunks:
    """The framing of a body in chunks (RFC 9112, 7.1).

    Args:
        max_body: Bytes of all chunks together.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._max_chunks = MAX_CHUNKS
        self._num_bytes = 0
        self._num_chunks = 0
        self._in_chunk = False
        self._in_trailers: int | None = None  # bytes of the lines behind the last chunk
        self.is_complete = False

    def allow(self, max_body: int) -> None:
        """Have all chunks be larger together, and be as many more."""
        self._max_body = max_body
        self._max_chunks = max(MAX_CHUNKS, max_body // BYTES_PER_CHUNK)

    def step(self, data: bytes, position: int) -> tuple[int, int | None]:
        """Find the next chunk.

        Returns:
            Offset at which it begins, or at which a line begins that is not there yet; and its size
            in bytes, None without a next chunk, now or for good.
        """
        while not self.is_complete:
            line_end = self._end_of_line(data, position)
            if line_end is None:
                break
            line, position = data[position:line_end], line_end + 2
            if self._in_trailers is not None:
                self._take_trailer(line)
            elif self._in_chunk:
                if line:
                    raise Refused(400, _BAD + "a chunk beyond its size")
                self._in_chunk = False
            elif size := self._take_size(line):
                self._in_chunk = True
                return position, size
        return position, None

    def _end_of_line(self, data: bytes, position: int) -> int | None:
        most = MAX_CHUNK_LINE if self._in_trailers is None else MAX_HEAD - self._in_trailers
        newline = data.find(b"\n", position, position + most)
        if newline < 0:
            if len(data) - position >= most:
                raise Refused(431 if self._in_trailers is not None else 400, "a line of a body in chunks is too long")
            return None
        if newline == position or data[newline - 1] != 0x0D:
            raise Refused(400, _BAD + "a bare LF")
        return newline - 1

    def _take_size(self, line: bytes) -> int:
        written = _CHUNK_SIZE.fullmatch(line)
        if written is None:
            raise Refused(400, _BAD + "a chunk without its size")
        size = int(written[1], 16)
        self._num_chunks += 1
        self._num_bytes += size
        if self._num_bytes > self._max_body:
            raise Refused(413, f"the body has more than {self._max_body} bytes")
        if self._num_chunks > self._max_chunks:
            raise Refused(413, f"the body comes in more than {self._max_chunks} chunks")
        if size == 0:
            self._in_trailers = 0
        return size

    def _take_trailer(self, line: bytes) -> None:
        assert self._in_trailers is not None
        self._in_trailers += len(line) + 2
        if line.translate(None, _IN_LINES):
            raise Refused(400, _BAD + "a control character behind the body")
        self.is_complete = not line
