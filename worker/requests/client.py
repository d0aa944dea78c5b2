"""The label of the client whom a request comes from, as the front door gives it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker.errors import InvalidRequest

METADATA_KEY = "client"
"""Key of the runtime's metadata; over HTTP the header ``x-dynamo-meta-client``."""

LABEL_CHARACTERS = 16

_LABEL = re.compile(r"[\x21-\x7e]{1,64}")


def client_of(metadata: Mapping[str, str]) -> str | None:
    """The label, None without one: all such requests are one client's.

    Raises:
        InvalidRequest: it is no label.
    """
    label = metadata.get(METADATA_KEY)
    if label is not None and not _LABEL.fullmatch(label):
        raise InvalidRequest(f"metadata.{METADATA_KEY}", "must be 1 to 64 printable ASCII characters without blanks")
    return label
