"""Names of the streams, subjects, buckets and keys of batches, and the messages in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from worker.errors import shown
from worker.runtimes.nats.protocol import TOKEN, Malformed, Subjects, decoded, encoded

PRIORITIES = ("high", "normal", "low")
"""Priorities of batches, in the order in which workers take their requests."""

URLS = ("/v1/chat/completions", "/v1/completions")

BATCHES = "dlw-batches"
"""Bucket of `BatchRecord`, by id."""

BODIES = "dlw-batch-bodies"
"""Object store of bodies and results that are too large for a message, by digest."""

RETURNS = "dlw-batch-returns"
"""Bucket: how often a request came back without a failure, from a worker that shut down or made
room; these deliveries do not count as attempts.
"""

CONSUMER = "workers"
DEAD_LETTERS = "DLW_BATCH_DEAD"
DEAD_LETTER_SUBJECT = "dlw-batch-dead"
CANCEL_SUBJECT = "dlw-batch-cancel"

LARGE_BYTES = 256 * 2**10
"""Bytes from which on a body or a result goes into the object store."""

HEADERS_BYTES = 4 * 2**10
"""Part of a message's largest size that is kept for its headers."""

MAX_CUSTOM_ID = 512

DUPLICATE_WINDOW_S = 3600.0
"""Seconds for which the server knows message ids: an interrupted submission can be repeated."""


def large_bytes(max_payload: int) -> int:
    """Size from which on a body or a result goes into the object store, of a server whose messages
    have at most `max_payload` bytes.
    """
    return max(0, min(LARGE_BYTES, max_payload - HEADERS_BYTES))


def stream_name(subjects: Subjects, priority: str) -> str:
    """The work queue of a model's version and a priority."""
    return f"DLW_BATCH_{subjects.service.removeprefix('dlw-')}_{priority}"


def queue_subject(subjects: Subjects, priority: str, batch: str = "*") -> str:
    """Subject of the requests of a batch in the work queue."""
    return f"dlw-batch.{subjects.root.removeprefix('dlw.')}.{priority}.{batch}"


def results_bucket(batch: str) -> str:
    """Bucket of a batch's results, by `result_key`."""
    return f"dlw-results-{batch}"


def result_key(custom_id: str) -> str:
    """``custom_id`` as the key of a bucket; what a key may not have is encoded."""
    if TOKEN.fullmatch(custom_id):
        return custom_id
    return "=" + base64.urlsafe_b64encode(custom_id.encode()).decode()


def custom_id_of(key: str) -> str:
    """The id that `result_key` made the key of. Raises `ValueError` if it is none of its keys."""
    if not key.startswith("="):
        return key
    return base64.urlsafe_b64decode(key[1:]).decode()


def digest(data: bytes) -> str:
    """128 bits of it, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def request_digest(custom_id: str, url: str, body: Any) -> str:
    """Digest of one request; its ids and, unless it has one, its seed are made of it."""
    return digest(json.dumps([custom_id, url, body], sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Description and state of a batch.

    Attributes:
        id: Id of the batch.
        model: Served model name.
        version: Version of the model.
        priority: One of `PRIORITIES`.
        num_requests: Number of requests; 0 while they are being submitted.
        deadline_s: Seconds since 1970 after which a request is not answered any more; None without.
        cancelled: Whether it was cancelled.
    """

    id: str
    model: str
    version: str
    priority: str
    num_requests: int = 0
    deadline_s: float | None = None
    cancelled: bool = False

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.model, self.version)

    def as_bytes(self) -> bytes:
        return encoded(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> BatchRecord:
        """Raises `Malformed` for what is none."""
        return cls(**_checked(decoded(data), _OF_RECORD, {field.name for field in fields(cls)}))


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request of a batch in the work queue.

    Attributes:
        batch: Id of the batch.
        index: Number of the line in the file, from 0.
        custom_id: The client's.
        url: One of `URLS`.
        body: JSON data that the client sent; None if it is an object of `BODIES`.
        body_digest: Name of that object; empty with a `body`.
        deadline_s: Seconds since 1970 after which it is not answered any more.
    """

    batch: str
    index: int
    custom_id: str
    url: str
    body: Any = None
    body_digest: str = ""
    deadline_s: float | None = None

    @property
    def key(self) -> str:
        """Key of its result."""
        return result_key(self.custom_id)

    def as_bytes(self) -> bytes:
        return encoded(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> QueuedRequest:
        """Raises `Malformed` for what is none."""
        found = _checked(decoded(data), _OF_REQUEST, {field.name for field in fields(cls)})
        if found.get("body_digest") and found.get("body") is not None:
            raise Malformed("the message has both body and body_digest")
        return cls(**found)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) and TOKEN.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_CUSTOM_ID


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"([0-9a-f]{32})?", value) is not None


def _is_time(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 2**53 and math.isfinite(value))


_Checks = Mapping[str, tuple[Callable[[Any], bool], str, bool]]
"""A check of each field, the same in words, and whether it must be there."""

_TOKEN = (_is_token, f"a text that matches {TOKEN.pattern}", True)
_TIME = (_is_time, "a number of seconds or null", False)
_OF_REQUEST: _Checks = {
    "batch": _TOKEN,
    "index": (_is_count, "an integer of at least 0", True),
    "custom_id": (_is_name, f"a text of 1 to {MAX_CUSTOM_ID} characters", True),
    "url": (_is_name, f"a text of 1 to {MAX_CUSTOM_ID} characters", True),
    "body_digest": (_is_digest, "32 hexadecimal digits or empty", False),
    "deadline_s": _TIME,
}
_OF_RECORD: _Checks = {
    "id": _TOKEN,
    "model": (lambda value: isinstance(value, str), "a text", True),
    "version": (lambda value: isinstance(value, str), "a text", True),
    "priority": (lambda value: value in PRIORITIES, f"one of {', '.join(PRIORITIES)}", True),
    "num_requests": (_is_count, "an integer of at least 0", False),
    "deadline_s": _TIME,
    "cancelled": (lambda value: type(value) is bool, "true or false", False),
}


def _checked(found: dict[str, Any], checks: _Checks, known: set[str]) -> dict[str, Any]:
    """Raises `Malformed` for a field that is unknown, missing, or not what it must be."""
    unknown = sorted(found.keys() - known)
    if unknown:
        raise Malformed(f"the message has the unknown field {unknown[0][:60]!r}")
    for name, (is_right, expected, is_needed) in checks.items():
        if name not in found and is_needed:
            raise Malformed(f"the message has no {name}")
        if name in found and not is_right(found[name]):
            raise Malformed(f"{name} must be {expected}, got {shown(found[name])}")
    return found
