"""`EngineAddress`: where a worker listens."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from worker.arguments.values import is_host


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of a worker behind OpenEngine.

    Attributes:
        host: Name or address.
        port: Port of its gRPC server.
        has_tls: Whether it is reached over TLS.
    """

    host: str
    port: int
    has_tls: bool = False

    @classmethod
    def of(cls, url: str) -> EngineAddress:
        """The worker at ``grpc://host:port``, or ``grpcs://host:port``. Raises `ValueError`."""
        parts = urlsplit(url)
        has_rest = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
        host = parts.hostname or ""
        if parts.scheme not in ("grpc", "grpcs") or not is_host(host) or not parts.port or has_rest:
            raise ValueError(f"must be grpc://host:port or grpcs://host:port, got {url!r}")
        return cls(host, parts.port, parts.scheme == "grpcs")

    @property
    def target(self) -> str:
        """The address as gRPC writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'grpcs' if self.has_tls else 'grpc'}://{self.target}"
