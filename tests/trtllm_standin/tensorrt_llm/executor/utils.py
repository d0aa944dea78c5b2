"""Errors."""


class RequestError(RuntimeError):
    """One request failed."""
