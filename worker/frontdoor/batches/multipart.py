"""A form with a file (RFC 7578), read from the disk: it may be larger than memory has room for.

What two parsers may read in two ways is refused: a second field of a name, a second header, text
before the first part. The standard library reads the headers; parts are found by their boundary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value
from pathlib import Path
from typing import BinaryIO

from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.values import printable

MAX_PARTS = 16
MAX_HEADERS = 16 * 1024
"""Bytes of the headers of one part."""

MAX_TEXT = 4096
"""Bytes of a field that is no file."""

MAX_FILENAME = 255
"""Characters of the name of a file."""

MAX_SEMICOLONS = MAX_FILENAME + 16
"""Semicolons of the headers of one part: the standard library looks at all that is before each of
them for quotes, and the thread that does so keeps the event loop waiting.
"""

BLOCK = 1 << 20
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_CHARSETS = ("utf-8", "iso-8859-1", "us-ascii")
"""Charsets of a ``filename*``: with others, Python's codecs of any kind would be run."""

_MALFORMED = "the body is not the multipart/form-data that it should be: "


@dataclass(frozen=True, slots=True)
class FormFile:
    """A file in a form.

    Attributes:
        filename: Name that the client gives it; it leads nowhere.
        begin: Offset of its content in the body.
        end: Offset behind its content.
    """

    filename: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Form:
    """A form.

    Attributes:
        texts: The fields that are texts, by name.
        files: The fields that are files, by name.
    """

    texts: dict[str, str]
    files: dict[str, FormFile]


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that a ``Content-Type`` names.

    Raises:
        Refused: 415, it is that of another body; 400, it has no boundary.
    """
    header = _headers(b"content-type: " + content_type)
    if header.get_content_type() != "multipart/form-data":
        raise Refused(415, "an upload must be multipart/form-data", "content-type")
    names = [name for name, _ in header.get_params() or ()]
    if len(set(names)) < len(names):
        raise Refused(400, _MALFORMED + "the content type has a parameter twice", "content-type")
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise Refused(400, _MALFORMED + "the content type has no boundary", "content-type")
    return boundary.encode()


def read_form(body: Path, boundary: bytes, texts: Collection[str], files: Collection[str]) -> Form:
    """The form in a body.

    Args:
        body: File of the body.
        boundary: See `boundary_of`.
        texts: Names of fields that are texts.
        files: Names of fields that are files.

    Raises:
        Refused: 400, it is malformed, or has an unknown field, or one twice.
    """
    form = Form({}, {})
    with body.open("rb") as file:
        for head, begin, end in _parts(file, boundary):
            name, filename = _disposition(head)
            if name in form.texts or name in form.files:
                raise FieldRefused(printable(name), "occurs twice in the form")
            if name in files:
                if filename is None:
                    raise FieldRefused(name, "must be a file, with a filename")
                form.files[name] = FormFile(_checked_filename(name, filename), begin, end)
            elif name in texts:
                form.texts[name] = _text(file, name, begin, end)
            else:
                known = ", ".join((*files, *texts))
                raise FieldRefused(printable(name), f"no field of an upload; it has {known}")
    return form


def _parts(file: BinaryIO, boundary: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Headers of each part, and the offsets at which its content begins and ends."""
    delimiter = b"--" + boundary
    position = len(delimiter)
    if file.read(position) != delimiter:
        raise Refused(400, _MALFORMED + "it does not begin with its boundary")
    for _ in range(MAX_PARTS + 1):
        file.seek(position)
        head = file.read(MAX_HEADERS + 4)
        if head.startswith(b"--"):
            file.seek(position + 2)
            if file.read(3).strip(b"\r\n"):
                raise Refused(400, _MALFORMED + "there is text behind its end")
            return
        if not head.startswith(b"\r\n"):
            raise Refused(400, _MALFORMED + "a boundary is followed by neither a line end nor its end")
        length = head.find(b"\r\n\r\n")
        if length < 0:
            raise Refused(400, _MALFORMED + f"a part without headers, or with more than {MAX_HEADERS} bytes of them")
        begin = position + length + 4
        end = _find(file, b"\r\n" + delimiter, begin)
        yield head[2:length], begin, end
        position = end + 2 + len(delimiter)
    raise Refused(400, _MALFORMED + f"it has more than {MAX_PARTS} parts")


def _find(file: BinaryIO, sought: bytes, position: int) -> int:
    """Offset of the first occurrence of ``sought`` at or behind ``position``."""
    file.seek(position)
    kept = b""
    while block := file.read(BLOCK):
        found = (kept + block).find(sought)
        if found >= 0:
            return position - len(kept) + found
        position += len(block)
        kept = (kept + block)[1 - len(sought) :]
    raise Refused(400, _MALFORMED + "it ends within a part")


def _disposition(head: bytes) -> tuple[str, str | None]:
    """Name of a part, and its filename if it has one. Raises `Refused` (400)."""
    headers = _headers(head)
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise Refused(400, _MALFORMED + "a part with a content-transfer-encoding")
    given = headers.get_params(header="content-disposition") or [("", "")]
    extended = next((value for name, value in given if name == "filename" and isinstance(value, tuple)), None)
    names = [name for name, value in given if value is not extended]
    if given[0] != ("form-data", "") or len(set(names)) < len(names):
        raise Refused(400, _MALFORMED + "a part whose content-disposition is not that of one field")
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise Refused(400, _MALFORMED + "a part without a name")
    if extended is None:
        return name, headers.get_filename()
    # .NET's clients send filename beside filename*, which counts (RFC 6266, 4.3)
    if (extended[0] or "").lower() not in _CHARSETS:
        raise Refused(400, _MALFORMED + f"a filename in a charset that is none of {', '.join(_CHARSETS)}")
    return name, collapse_rfc2231_value(extended).strip()


def _headers(head: bytes) -> Message:
    """The headers of a part. Raises `Refused` (400) if one is malformed, or there twice."""
    try:
        text = head.decode()
    except UnicodeDecodeError:
        raise Refused(400, _MALFORMED + "a header that is not UTF-8") from None
    if any(_is_control(each) and each != "\t" for line in text.split("\r\n") for each in line):
        raise Refused(400, _MALFORMED + "a control character in a header")
    if text.count(";") > MAX_SEMICOLONS:
        raise Refused(400, _MALFORMED + f"a header with more than {MAX_SEMICOLONS} semicolons")
    found = HeaderParser().parsestr(text + "\r\n\r\n")
    names = [name.lower() for name in found]
    if found.defects or len(set(names)) < len(names):
        raise Refused(400, _MALFORMED + "a header that is malformed, or is there twice")
    return found


def _is_control(character: str) -> bool:
    """Whether a character is one of control, ends a line, or is half of a surrogate pair. Spaces of
    every width and joiners, which names of files have, are none of them.
    """
    return unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")


def _checked_filename(field: str, filename: str) -> str:
    """A filename, which is a text to show. Raises `FieldRefused`."""
    if not 1 <= len(filename) <= MAX_FILENAME or any(map(_is_control, filename)):
        raise FieldRefused(f"{field}.filename", f"must be 1 to {MAX_FILENAME} characters, none of control")
    return filename


def _text(file: BinaryIO, name: str, begin: int, end: int) -> str:
    """The value of a field that is a text. Raises `FieldRefused`."""
    if end - begin > MAX_TEXT:
        raise FieldRefused(name, f"must have at most {MAX_TEXT} bytes")
    file.seek(begin)
    try:
        return file.read(end - begin).decode()
    except UnicodeDecodeError:
        raise FieldRefused(name, "must be a text in UTF-8") from None
