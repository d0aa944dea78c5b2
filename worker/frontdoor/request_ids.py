"""Ids of requests: a client's own or a new one, on every answer, and apart for each client.

``x-request-id`` is what client and operator look an answer up by: each answer has it.
``x-dynamo-request-id``, a UUID, is the id under which workers keep a request's state. Where clients
have API keys, the one that a client chooses is made another, of the key and it: no client can name
the request of another.
"""

from __future__ import annotations

import os
import re
import uuid

from worker.frontdoor.request_reader import Head

REQUEST_ID = b"x-request-id"
DYNAMO_ID = b"x-dynamo-request-id"
ID_HEADERS = frozenset((DYNAMO_ID, REQUEST_ID))
"""Headers in which a client may choose the id of its request."""

_ID = re.compile(rb"[\x21-\x7e]{1,200}")


def new_request_id() -> bytes:
    """An id that no other request has."""
    return os.urandom(16).hex().encode()


def request_id_of(head: Head, otherwise: bytes) -> bytes:
    """The client's ``x-request-id`` if it is up to 200 printable characters, else ``otherwise``."""
    given = head.headers.get(REQUEST_ID)
    return otherwise if given is None or _ID.fullmatch(given) is None else given


def id_lines(head: Head, request_id: bytes, key_label: bytes, choice: int = 0) -> bytes:
    """The header lines with the ids of a request to a frontend, each with its CRLF.

    Args:
        head: Head of the client's request.
        request_id: See `request_id_of`.
        key_label: Label of the client's API key; empty where there are no keys.
        choice: Number of the choice that the request is for; the first has the id that the client
            chose for the workers.
    """
    lines = b"%b: %b\r\n" % (REQUEST_ID, request_id)
    own = head.headers.get(DYNAMO_ID) if choice == 0 else None
    if own is not None and key_label:
        own = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{key_label.decode()} {own.decode('latin-1')}")).encode()
    return lines if own is None else lines + b"%b: %b\r\n" % (DYNAMO_ID, own)
