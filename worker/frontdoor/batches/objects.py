"""Files and batches as they are stored, and as OpenAI's objects."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
FINISHED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")

INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files: requests that a client uploads, and results."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file; times are in seconds since the epoch.

    Attributes:
        number: Position in the order of creation.
        id: Id, which is also the name of the file on disk.
        owner: Label of the client that it belongs to.
        filename: Name that the client gave it; no path.
        purpose: `INPUT` or `OUTPUT`.
        bytes: Size of its content.
        created_at: Time at which it was uploaded or written.
        expires_at: Time at which it is deleted.
    """

    number: int
    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's ``file`` object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch; times are in seconds since the epoch, None for what has not happened.

    Attributes:
        number: Position in the order of creation.
        id: Id of the batch.
        owner: Label of the client that it belongs to.
        endpoint: Path that its requests are for.
        input_file_id: The file of its requests.
        completion_window: Time in which it is to be done, as the client wrote it.
        metadata: JSON of the client's key-value pairs, None without any.
        output_lifetime_s: Seconds for which its results are kept.
        status: OpenAI's status.
        model: The model of its requests, None unless all name the same one.
        errors: JSON of the problems of its input file, None without any.
        output_file_id: The file of its answers, once there is one.
        error_file_id: The file of its errors, once there is one.
        total: Number of requests.
        completed: Number of requests that have an answer.
        failed: Number of requests that have an error.
        input_tokens: Tokens of the prompts of its answers; None, as of the next ones, if they
            were not counted from its beginning.
        cached_tokens: Tokens of the prompts that were cached.
        output_tokens: Tokens of its answers.
        reasoning_tokens: Tokens of the answers that are reasoning.
    """

    number: int
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str | None
    output_lifetime_s: int
    status: Status
    model: str | None
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None
    total: int
    completed: int
    failed: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None

    @property
    def is_finished(self) -> bool:
        """Whether its status changes no more."""
        return self.status in FINISHED

    def as_json(self) -> dict[str, Any]:
        """OpenAI's ``batch`` object."""
        errors = None if self.errors is None else {"object": "list", "data": json.loads(self.errors)}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **{name: getattr(self, name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self._usage(),
            "metadata": None if self.metadata is None else json.loads(self.metadata),
        }

    def _usage(self) -> dict[str, Any] | None:
        """OpenAI's usage of all answers together."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


_TIMES = tuple(field.name for field in fields(StoredBatch) if field.name.endswith("_at"))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of an answer; see `StoredBatch`."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one request of a batch.

    Attributes:
        line: Number of its line in the input file, from 1.
        status_code: HTTP status of the answer.
        request_id: Id under which the request was sent.
        body: JSON of the answer, in ASCII and without line ends.
    """

    line: int
    status_code: int
    request_id: str
    body: bytes

    @property
    def succeeded(self) -> bool:
        """Whether the answer is no error."""
        return 200 <= self.status_code < 300


Stored = TypeVar("Stored", StoredFile, StoredBatch)


@dataclass(frozen=True, slots=True)
class Page(Generic[Stored]):
    """A part of a list.

    Attributes:
        items: Objects of this part, in the order asked for.
        has_more: Whether there are more behind it.
    """

    items: list[Stored]
    has_more: bool

    def as_json(self) -> dict[str, Any]:
        """OpenAI's ``list`` object."""
        return {
            "object": "list",
            "data": [each.as_json() for each in self.items],
            "first_id": self.items[0].id if self.items else None,
            "last_id": self.items[-1].id if self.items else None,
            "has_more": self.has_more,
        }


def file_of(row: sqlite3.Row) -> StoredFile:
    """The file that a row of the table is."""
    return StoredFile(*row)


def batch_of(row: sqlite3.Row) -> StoredBatch:
    """The batch that a row of the table is."""
    return StoredBatch(**dict(row))
