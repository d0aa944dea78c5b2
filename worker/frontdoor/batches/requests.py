"""Requests for files and batches, checked: every field is honoured, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.batches.objects import INPUT, OUTPUT
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.query import integer_in, is_descending
from worker.frontdoor.values import metadata, printable

WINDOWS_S = {"24h": 24 * 3600}
"""Completion windows, and their seconds."""

DEFAULT_LIFETIME_S = 30 * 24 * 3600
"""Seconds for which a file is kept unless the client says otherwise, as OpenAI keeps those of
batches.
"""

LEAST_LIFETIME_S, MOST_LIFETIME_S = 3600, 30 * 24 * 3600
MOST_FILES, MOST_BATCHES = 10_000, 100
"""Largest ``limit`` of a list."""

UPLOAD_TEXTS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
UPLOAD_FILES = ("file",)
_BATCH_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that a client begins; see `StoredBatch`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_lifetime_s: int

    @property
    def window_s(self) -> int:
        """Seconds in which it is to be done."""
        return WINDOWS_S[self.completion_window]


def new_batch(fields: Mapping[str, Any], endpoints: Collection[str]) -> NewBatch:
    """The batch that the body of a POST asks for.

    Args:
        fields: The body.
        endpoints: Paths that requests of batches may be for.

    Raises:
        FieldRefused: a field is unknown, missing or malformed.
    """
    for name in fields:
        if name not in _BATCH_FIELDS:
            raise FieldRefused(printable(name), f"no field of a batch; it has {', '.join(_BATCH_FIELDS)}")
    file_id = fields.get("input_file_id")
    if not isinstance(file_id, str):
        raise FieldRefused("input_file_id", "must be the id of a file")
    endpoint, window = fields.get("endpoint"), fields.get("completion_window")
    if not isinstance(endpoint, str) or endpoint not in endpoints:
        raise FieldRefused("endpoint", f"must be one of {', '.join(endpoints)}")
    if not isinstance(window, str) or window not in WINDOWS_S:
        raise FieldRefused("completion_window", f"must be {' or '.join(WINDOWS_S)}")
    lifetime_s = DEFAULT_LIFETIME_S
    if fields.get("output_expires_after") is not None:
        lifetime_s = _lifetime_s("output_expires_after", fields["output_expires_after"])
    given = None if fields.get("metadata") is None else metadata(fields["metadata"])
    return NewBatch(file_id, endpoint, window, given, lifetime_s)


def _lifetime_s(name: str, given: Any) -> int:
    """The seconds of an ``expires_after``."""
    if not isinstance(given, dict):
        raise FieldRefused(name, "must be an object with anchor and seconds")
    for key in given:
        if key not in ("anchor", "seconds"):
            raise FieldRefused(f"{name}.{printable(key)}", "no field of it; it has anchor and seconds")
    if given.get("anchor") != "created_at":
        raise FieldRefused(f"{name}.anchor", "must be created_at")
    seconds = given.get("seconds")
    if type(seconds) is not int or not LEAST_LIFETIME_S <= seconds <= MOST_LIFETIME_S:
        raise FieldRefused(f"{name}.seconds", f"must be an integer from {LEAST_LIFETIME_S} to {MOST_LIFETIME_S}")
    return seconds


def upload_lifetime_s(texts: Mapping[str, str]) -> int:
    """Seconds for which an upload is kept.

    Args:
        texts: Fields of its form.

    Raises:
        FieldRefused: its purpose is not that of a batch, or a field is malformed.
    """
    purpose = texts.get("purpose")
    if purpose != INPUT:
        raise FieldRefused("purpose", f"must be {INPUT}: files are for batches here")
    given = {key: texts[f"expires_after[{key}]"] for key in ("anchor", "seconds") if f"expires_after[{key}]" in texts}
    if not given:
        return DEFAULT_LIFETIME_S
    seconds = given.get("seconds", "")
    number = int(seconds) if re.fullmatch(r"[0-9]{1,9}", seconds) else None
    return _lifetime_s("expires_after", {**given, "seconds": number})


@dataclass(frozen=True, slots=True)
class Listing:
    """Parameters of a list.

    Attributes:
        after: Id of the object before the first one.
        limit: Most objects of the answer.
        descending: Whether the newest comes first.
        purpose: Purpose of files; None for any.
    """

    after: str | None
    limit: int
    descending: bool
    purpose: str | None


def file_listing(query: Mapping[str, str]) -> Listing:
    """The parameters of a list of files. Raises `FieldRefused`."""
    _check_names(query, ("after", "limit", "order", "purpose"))
    purpose = query.get("purpose")
    if purpose not in (None, INPUT, OUTPUT):
        raise FieldRefused("purpose", f"must be {INPUT} or {OUTPUT}")
    return Listing(
        query.get("after"), integer_in(query, "limit", 1, MOST_FILES, MOST_FILES), is_descending(query), purpose
    )


def batch_listing(query: Mapping[str, str]) -> Listing:
    """The parameters of a list of batches. Raises `FieldRefused`."""
    _check_names(query, ("after", "limit"))
    return Listing(query.get("after"), integer_in(query, "limit", 1, MOST_BATCHES, 20), True, None)


def _check_names(query: Mapping[str, str], known: Collection[str]) -> None:
    for name in query:
        if name not in known:
            raise FieldRefused(printable(name), f"no parameter of this list; it has {', '.join(known)}")
