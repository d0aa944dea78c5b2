"""HTTP requests of the clients, and what their answers mean; both clients share it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dynamo_logits_client.errors import ClientError, Refused
from dynamo_logits_client.version import __version__

BASE_URL = "http://127.0.0.1:8000/v1"
"""Address of the launch scripts."""

TIMEOUT_S = 600.0
"""Seconds for which a server may send nothing."""

MAX_TIMEOUT_S = 10**9
"""Largest timeout, which every socket takes."""

CHAT, COMPLETIONS, MODELS, CATALOGUE = "/chat/completions", "/completions", "/models", "/logits_processors"


@dataclass(frozen=True)
class Server:
    """Address and headers of requests.

    Args:
        base_url: Address with the path before ``/chat/completions``.
        api_key: Key of the ``Authorization`` header.
        headers: Further headers of every request.

    Raises:
        ValueError: the address is no ``http://`` or ``https://`` one, or the key fits no header.
    """

    base_url: str = BASE_URL
    api_key: str | None = None
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base_url, str) or not _is_address(self.base_url):
            raise ValueError(f"base_url: expected http://host:port/v1 or https://host:port/v1, got {self.base_url!r}")

        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: expected printable ASCII")

    def url(self, path: str) -> str:
        """The whole address of an endpoint."""
        return self.base_url.rstrip("/") + path

    def request_headers(self, *, has_body: bool) -> dict[str, str]:
        """Headers of a request."""
        found = {"accept": "application/json, text/event-stream", "user-agent": f"dynamo-logits-client/{__version__}"}
        if has_body:
            found["content-type"] = "application/json"
        if self.api_key is not None:
            found["authorization"] = f"Bearer {self.api_key}"
        return {**found, **{name.lower(): value for name, value in (self.headers or {}).items()}}


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number up to 65535, or the IPv6 address none
        return False
    return has_host and parts.scheme in ("http", "https") and not parts.query and not parts.fragment


def checked_timeout(timeout_s: float) -> float:
    """Seconds for which a server may send nothing. Raises `ValueError`."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s: expected seconds above 0 and at most {MAX_TIMEOUT_S}, got {timeout_s!r}")
    return timeout_s


def body_of(fields: Mapping[str, Any], *, stream: bool) -> bytes:
    """The body of a request.

    Raises:
        ValueError: a number is NaN or infinite, or ``stream`` is among the fields.
        TypeError: a field is not JSON data.
    """
    if "stream" in fields:
        raise ValueError("stream: call the method that streams instead")
    return json.dumps({**fields, "stream": True} if stream else dict(fields), allow_nan=False).encode()


def data_of(status: int, body: bytes) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        Refused: the status is an error's.
        ClientError: the body is no JSON object.
    """
    if status != 200:
        raise Refused(status, body)
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ClientError(f"expected a JSON object, got {body[:200]!r}")
    return data
