"""Errors of requests, for clients."""

from __future__ import annotations


class RequestError(Exception):
    """A worker has refused a request, or failed to answer it.

    Args:
        code: HTTP status code.
        kind: Class of the worker's error.
        message: One sentence about the cause.
        field: Field of the request that was refused, if one was.
    """

    def __init__(self, code: int, kind: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind
        self.field = field


class NoWorkers(RequestError):
    """No worker serves this model and version."""

    def __init__(self, subject: str) -> None:
        super().__init__(503, "NoWorkers", f"no worker listens at {subject}")


class WorkerLost(RequestError):
    """The worker was silent for seconds: it died, or the network did."""

    def __init__(self, silent_s: float) -> None:
        super().__init__(503, "WorkerLost", f"nothing was heard of the worker for {silent_s:.1f} s")


class ConnectionClosed(RequestError):
    """The connection to NATS was closed for good while the answer was under way: by this client, or
    by a server that does not let it in any more.
    """

    def __init__(self) -> None:
        super().__init__(499, "ConnectionClosed", "the connection to NATS was closed")
