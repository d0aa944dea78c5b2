"""The frontends behind the front door: who is next, and who was dead a moment ago."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

SKIP_S = 2.0
"""How long a frontend that could not be reached is tried after the others."""


class NoUpstream(Exception):
    """No frontend can be reached."""


@dataclass(slots=True)
class Upstream:
    """One frontend.

    Attributes:
        host: Name or address.
        port: Of its HTTP server.
        dead_until: Monotonic time until which it is tried last.
    """

    host: str
    port: int
    dead_until: float = 0.0

    @classmethod
    def of(cls, url: str) -> Upstream:
        """The frontend at ``http://host:port``. Raises `ValueError`."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
            raise ValueError(f"must be http://host:port, got {url!r}")
        return cls(parts.hostname, parts.port or 80)

    def __str__(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class Upstreams:
    """Frontends in turn, the dead ones last.

    Args:
        upstreams: At least one.
        connect_timeout_s: How long to wait for a connection.
        now: The clock; tests have their own.
    """

    def __init__(
        self, upstreams: Sequence[Upstream], connect_timeout_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._upstreams = list(upstreams)
        self._connect_timeout_s = connect_timeout_s
        self._now = now
        self._num_requests = 0

    def in_turn(self) -> list[Upstream]:
        """All of them, in the order in which the next request tries them."""
        now = self._now()
        alive = [upstream for upstream in self._upstreams if upstream.dead_until <= now]
        dead = [upstream for upstream in self._upstreams if upstream.dead_until > now]
        start = self._num_requests % max(1, len(alive))
        self._num_requests += 1
        return alive[start:] + alive[:start] + dead

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """A new connection to the first that takes one; nothing has been sent on it.

        Raises:
            NoUpstream: none does.
        """
        loop = asyncio.get_running_loop()
        for upstream in self.in_turn():
            connecting = loop.create_connection(protocol, upstream.host, upstream.port)
            try:
                transport, _ = await asyncio.wait_for(connecting, self._connect_timeout_s)
            except (OSError, asyncio.TimeoutError) as error:
                self._bury(upstream, error)
            else:
                upstream.dead_until = 0.0
                return transport
        raise NoUpstream

    def _bury(self, upstream: Upstream, error: Exception) -> None:
        if not upstream.dead_until:  # it was alive
            logger.warning("frontend %s cannot be reached: %s", upstream, error or type(error).__name__)
        upstream.dead_until = self._now() + SKIP_S
