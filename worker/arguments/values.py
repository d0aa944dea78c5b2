"""Parsers of options' values: text → value, or `ValueError` with the expected form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Parser of texts that match a pattern as a whole; an error says what was `expected`."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(expected)
        return text

    return parse


def text(text: str) -> str:
    if not text.strip():
        raise ValueError("a non-empty text")
    return text


def is_host(text: str) -> bool:
    """Whether it can be an address, or the name of a host: Python looks up no other, and says so
    with an error that is none of the system's.
    """
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def host(text: str) -> str:
    if not text.strip() or not is_host(text):
        raise ValueError("an address or the name of a host")
    return text


url = matching(r"https?://[^\s/?#]+(/[^\s?#]*)?", "an http:// or https:// URL")


def positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise ValueError("an integer of at least 1")
    return int(text)


def not_negative(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("an integer of at least 0")
    return int(text)


def fraction(text: str) -> float:
    found = float(text) if re.fullmatch(r"[0-9]{0,3}(\.[0-9]{1,9})?", text) and text else 0.0
    if not 0 < found <= 1:
        raise ValueError("a fraction above 0, of at most 1")
    return found


def discovery_key(adapter: str) -> str:
    """The key of an adapter in Dynamo's discovery, where two of one key take each other's place,
    and one of an empty key takes that of the model itself.
    """
    return re.sub(r"[^a-z0-9_-]", "_", adapter.lower()).lstrip("_")


SUBJECT_PART = r"[!-)+,\-/-=?-~]+"
"""A part of a subject of NATS: printable ASCII without dots and wildcards."""

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def memory_size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(KiB|MiB|GiB)", text)
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size:
        raise ValueError("a size above 0 with its unit, KiB, MiB or GiB, for example 2GiB")
    return size


device = matching(r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda or cuda:N")


def packed_copy(text: str) -> str:
    if text not in ("auto", "off") and not Path(text).is_absolute():
        raise ValueError("auto, off or an absolute path")
    return text


def positive_seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text) or float(text) == 0:
        raise ValueError("a number of seconds above 0")
    return float(text)


store = matching(r"(file|nats|etcd):\S.*", "file:DIRECTORY, nats:URL or etcd:URL")


subject_token = matching(r"[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, hyphens and underscores")


def reply_prefixes(text: str) -> str:
    for one in comma_list(text):
        if not re.fullmatch(rf"({SUBJECT_PART}\.)+", one) or one.startswith(("$", "dlw.", "dlw-")):
            raise ValueError(
                "beginnings of subjects that end with a dot, neither NATS's own ($) nor the worker's (dlw)"
            )
    return text


def comma_list(text: str) -> tuple[str, ...]:
    entries = tuple(entry.strip() for entry in text.split(","))
    if not all(entries):
        raise ValueError("a list separated by commas")
    return entries


def named_directories(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(entry.partition("=")[::2] for entry in comma_list(text))
    names = [name for name, _ in pairs]
    if not all(name and directory for name, directory in pairs) or len(set(names)) < len(names):
        raise ValueError("NAME=DIRECTORY entries of different names")
    return pairs


def truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text):
        raise ValueError("a number of seconds of at least 0")
    return float(text)
