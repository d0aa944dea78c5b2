"""Names of the streams, subjects, buckets and keys of batches, and the messages in them."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from worker.runtimes.nats.protocol import TOKEN, Subjects, encoded

PRIORITIES = ("high", "normal", "low")
"""Of batches; workers take what is left of a slot in this order."""

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
"""From this size on a body or a result goes into the object store."""

DUPLICATE_WINDOW_S = 3600.0
"""How long the server knows message ids, so that an interrupted submission can be run again."""


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


def digest(data: bytes) -> str:
    """128 bits of it, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def request_digest(custom_id: str, url: str, body: Any) -> str:
    """Of one request; its ids and, unless it has one, its seed are made of it."""
    return digest(json.dumps([custom_id, url, body], sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What is known of a batch.

    Attributes:
        id: Of the batch.
        model: Served model name.
        version: Of the model.
        priority: One of `PRIORITIES`.
        num_requests: How many it has; 0 while it is being submitted.
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
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request of a batch in the work queue.

    Attributes:
        batch: Id of the batch.
        index: Its line in the file, from 0.
        custom_id: The client's.
        url: One of `URLS`.
        body: As the client sent it; None if it is an object of `BODIES`.
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
        """Of its result."""
        return result_key(self.custom_id)

    def as_bytes(self) -> bytes:
        return encoded(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> QueuedRequest:
        """Raises `ValueError` or `TypeError` for what is none."""
        return cls(**json.loads(data))
