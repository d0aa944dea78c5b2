"""Refusals of the front door, in the error shape of OpenAI's API."""

from __future__ import annotations

from typing import Any

from worker.errors import PROMPT_TOO_LONG

INVALID = "invalid_request_error"
MODEL_NOT_FOUND = "model: Model not found; /v1/models lists those that are served"


class Refused(Exception):
    """A request that is answered here, with an error.

    Args:
        status: HTTP status.
        message: One sentence for the caller.
        param: The field of the request that is to blame, as ``messages[0].content``.
        kind: OpenAI's type of error.
        code: OpenAI's code of the error, if there is one.
        headers: Further header lines of the answer, each with its CRLF.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        kind: str = INVALID,
        code: str | None = None,
        headers: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind
        self.code = code
        self.headers = headers

    def renamed(self, param: str | None) -> Refused:
        """The same error about the field ``param``, which the message names in place of its own."""
        message, old = self.message, self.param
        if param is not None and param != old:
            if old is not None:
                message = message.replace(f"`{old}`", f"`{param}`", 1)
            if old is not None and message.startswith(f"{old}: "):
                message = param + message.removeprefix(old)
            elif message == self.message and not message.startswith(f"{param}: "):
                message = f"{param}: {message}"
        return Refused(self.status, message, param, kind=self.kind, code=self.code, headers=self.headers)

    def content(self) -> dict[str, Any]:
        """The answer's JSON object, in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def code_of(message: str) -> str | None:
    """OpenAI's code for the error with this message of a worker or a frontend, if there is one."""
    problems = (message, message.partition(": ")[2])  # with and without the field
    return "context_length_exceeded" if any(each.startswith(PROMPT_TOO_LONG) for each in problems) else None


def unreachable() -> Refused:
    """The answer where no frontend can be reached; nothing has been sent."""
    return Refused(503, "no frontend can be reached", kind="server_error")


def no_answer(reason: str) -> Refused:
    """The answer where a frontend has gone before the end of its own, or has answered nonsense."""
    return Refused(502, f"the frontend did not answer: {reason}", kind="server_error")


def internal_error() -> Refused:
    """The answer to a request that met an error of the front door's own, which the log has."""
    return Refused(500, "internal error", kind="server_error")


class FieldRefused(Refused):
    """400: a field asks for what would be dropped, or would fail, behind the front door.

    Args:
        param: Path of the field.
        problem: Expected and actual value, in a phrase.
        code: See `Refused`.
    """

    def __init__(self, param: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(400, f"{param}: {problem}", param, code=code)
