"""Subjects, headers and errors of the NATS runtime; docs/nats.md describes them for clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.strict_json import LoneSurrogate, RepeatedKey, read_object
from worker.errors import (
    BoundaryStoreUnavailable,
    Draining,
    EngineBroken,
    GrammarsUnavailable,
    InvalidRequest,
    Overloaded,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
)

REQUEST_ID = "Dlw-Request-Id"
"""Header of a request: its id, `TOKEN` characters; without it the worker chooses one."""

WINDOW = "Dlw-Window"
"""Header of a request: messages that the worker may send ahead of acknowledgements."""

SEQUENCE = "Dlw-Seq"
"""Header of a message: its number, from 0; of an acknowledgement: number of the next one."""

KIND = "Dlw-Kind"
"""Header of a message: one of `CHUNK`, `END`, `ERROR` and `HEARTBEAT`; of an acknowledgement:
`RESUME`, if everything from the sequence number on is to be sent again, and `GONE`, if nothing is.
"""

CHUNK, END, ERROR, HEARTBEAT, RESUME, GONE = "chunk", "end", "error", "heartbeat", "resume", "gone"

ERROR_TEXT, ERROR_CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
"""Headers of errors, as NATS services have them."""

HEARTBEAT_S = 0.5
"""Seconds after which a worker that has nothing to send says that it is alive."""

LOST_S = 2.0
"""Seconds of silence after which a client gives its worker up."""

MAX_WINDOW = 4096

TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""One part of a subject that is a name or an id."""


def subject_token(name: str) -> str:
    """``name`` as one part of a subject: what subjects give a meaning becomes ``_``."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one model and version; an operator grants rights by them.

    Attributes:
        model: Served model name.
        version: Version of the model.
    """

    model: str
    version: str

    @property
    def root(self) -> str:
        """Beginning of all subjects, and the name of the service but for its dots."""
        return f"dlw.{subject_token(self.model)}.{subject_token(self.version)}"

    @property
    def service(self) -> str:
        """Name of the service under ``$SRV``."""
        return self.root.replace(".", "-")

    @property
    def generate(self) -> str:
        """Takes requests; all workers share a queue group."""
        return f"{self.root}.generate"

    @property
    def info(self) -> str:
        """Says what one of the workers is."""
        return f"{self.root}.info"

    def cancel(self, request_id: str) -> str:
        """A message to it ends the request, on whichever worker has it."""
        return f"{self.root}.cancel.{request_id}"

    def acknowledge(self, instance: str, request_id: str) -> str:
        """Takes a client's acknowledgements; the reply subject of every message of an answer."""
        return f"{self.root}.ack.{instance}.{request_id}"


_CODES: tuple[tuple[type[ServingError], int], ...] = (
    (InvalidRequest, 400),
    (RequestFailed, 422),
    (Overloaded, 429),
    (ProcessorUnavailable, 503),
    (GrammarsUnavailable, 503),
    (BoundaryStoreUnavailable, 503),
    (Draining, 503),
    (EngineBroken, 503),
)


def error_code(error: ServingError) -> int:
    """HTTP status code of an error: 4xx are the request's, 503 may be retried elsewhere."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), 500)


def error_body(error: ServingError) -> dict[str, Any]:
    """JSON data of an error, for the client."""
    body: dict[str, Any] = {"type": type(error).__name__, "code": error_code(error), "message": str(error)}
    if isinstance(error, InvalidRequest):
        body["field"] = error.field
    return body


def header_text(text: str) -> str:
    """``text`` as the value of a header: printable ASCII on one line, not too long."""
    return "".join(each if " " <= each <= "~" else " " if each.isspace() else "?" for each in text)[:500]


def encoded(data: Any) -> bytes:
    """Compact JSON. Half of a surrogate pair is kept as an escape, which readers refuse."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


PER_TOKEN = ("token_ids", "log_probs", "top_logprobs")
"""Keys of a chunk whose values have one entry per token."""


def halves(chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two chunks that say the same, with half of the tokens each; none for fewer than two tokens.

    The second one has all that belongs to no token, the text among it.
    """
    half = len(chunk.get("token_ids", ())) // 2
    if not half:
        return []
    lists = {key: chunk[key] for key in PER_TOKEN if key in chunk}
    text = {"text": ""} if "text" in chunk else {}
    first = {"index": chunk["index"], **text, **{key: values[:half] for key, values in lists.items()}}
    return [first, {**chunk, **{key: values[half:] for key, values in lists.items()}}]


MAX_DEPTH = 128
"""Levels of objects and lists in a message at most: far below what JSON can be written with."""


class Malformed(ValueError):
    """A message is no JSON object, or one that cannot be served; the text says what was expected.

    Args:
        problem: The text.
        field: Field that it is about.
    """

    def __init__(self, problem: str, field: str = "request") -> None:
        super().__init__(problem)
        self.field = field


def decoded(data: bytes) -> dict[str, Any]:
    """The JSON object in a message.

    Raises:
        Malformed: it is none, or one that two parsers may read in two ways, or nested too deep.
    """
    try:
        found = read_object(data)
    except RepeatedKey as error:
        raise Malformed(f"the message is ambiguous: {error}", error.path) from None
    except LoneSurrogate as error:
        raise Malformed(f"the message {error}", error.path) from None
    except ValueError as error:
        raise Malformed(f"the message {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(found):
        raise Malformed(f"the message is nested more than {MAX_DEPTH} deep")
    return found


def _is_deep(found: Any) -> bool:
    level = [found]
    for _ in range(MAX_DEPTH):
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for some in children for child in some if isinstance(child, (dict, list))]
        if not level:
            return False
    return True
