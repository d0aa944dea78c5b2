"""Errors of the client; each is a `ClientError`."""

from __future__ import annotations

import json
from typing import Any


class ClientError(Exception):
    """A request that has no whole answer."""


class Unreachable(ClientError):
    """The server could not be reached, or the connection broke."""


class TimedOut(Unreachable):
    """A server that sent nothing within the client's timeout."""


class Refused(ClientError):
    """An answer with an error's status.

    Args:
        status: HTTP status.
        body: Body of the answer.

    Attributes:
        status: HTTP status.
        message: Message of the server.
        param: JSON path of the field that is wrong, None if the server names none.
        type: OpenAI's ``error.type``, None if there is none.
        code: OpenAI's ``error.code``, None if there is none.
    """

    def __init__(self, status: int, body: bytes) -> None:
        error = error_of(body.decode("utf-8", "replace"))
        self.status = status
        self.message: str = error["message"]
        self.param: str | None = error.get("param")
        self.type: str | None = error.get("type")
        self.code: str | int | None = error.get("code")
        super().__init__(f"{status}: {self.message}")


class AnswerFailed(ClientError):
    """A streamed answer that ended with an error, or before its end.

    Attributes:
        message: Message of the server.
        param: JSON path of the field that is wrong, None if the server names none.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def error_of(text: str) -> dict[str, Any]:
    """The error's fields in an answer or an event, which may be none of the server's own."""
    try:
        data = json.loads(text)
    except ValueError:
        return {"message": text[:1000] or "an answer without a body"}
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    return {"message": error if isinstance(error, str) else text[:1000]}
