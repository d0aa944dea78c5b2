"""Connects to NATS: who we are, how the server proves who it is, and that we come back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client
from nats.errors import Error as NatsError

from worker.errors import StartupError, without_user
from worker.runtimes.nats.wire import TolerantClient

if TYPE_CHECKING:
    from worker.arguments import Arguments

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
CLOSE_S = 1.0
FLUSH_S = 2
RECONNECT_WAIT_S = 0.25
PENDING_BYTES = 16 * 2**20
"""Bytes that may wait to be sent while the server is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Address of the server, and credentials for it.

    Attributes:
        url: One or several, separated by commas; ``tls://`` asks for TLS, and
            ``USER:PASSWORD@`` may stand before a host.
        credentials: File with a user's JWT and NKey seed.
        token: Token for a server that wants one.
        nkey_seed: File with an NKey's seed.
        tls_ca: File of the certificates that the server's must be signed by; by default the
            system's.
        tls_cert: Our own certificate, with `tls_key`.
        tls_key: File of the key of `tls_cert`.
        inbox_prefix: Beginning of our inboxes, without a dot at the end: this user's, where
            users have inboxes of their own.
    """

    url: str = "nats://127.0.0.1:4222"
    credentials: str | None = None
    token: str | None = None
    nkey_seed: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    inbox_prefix: str = "_INBOX"

    @classmethod
    def of(cls, arguments: Arguments, inbox_prefix: str) -> ConnectionOptions:
        """Options of a connection to the server of a worker, with its rights."""
        return cls(
            url=arguments.nats_url,
            credentials=arguments.nats_credentials,
            token=arguments.nats_token,
            nkey_seed=arguments.nats_nkey_seed,
            tls_ca=arguments.nats_tls_ca,
            tls_cert=arguments.nats_tls_cert,
            tls_key=arguments.nats_tls_key,
            inbox_prefix=inbox_prefix,
        )

    @property
    def servers(self) -> list[str]:
        return [one.strip() for one in self.url.split(",")]

    @property
    def shown_url(self) -> str:
        """`url` without the user, password or token that it may have."""
        return without_user(self.url)

    def for_client(self) -> dict[str, Any]:
        """Keyword arguments of `nats.connect`.

        Raises:
            StartupError: a file cannot be read, or a package is missing.
        """
        given: dict[str, Any] = {"servers": self.servers, "inbox_prefix": self.inbox_prefix}
        needs_keys = self.credentials is not None or self.nkey_seed is not None
        if needs_keys and importlib.util.find_spec("nkeys") is None:
            raise StartupError("credentials and NKeys need the package nkeys: pip install nkeys")
        for name in ("credentials", "nkey_seed", "tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise StartupError(f"{name.replace('_', ' ')}: no such file: {path}")
        if self.credentials is not None:
            given["user_credentials"] = self.credentials
        if self.token is not None:
            given["token"] = self.token
        if self.nkey_seed is not None:
            given["nkeys_seed"] = self.nkey_seed
        if self.tls_ca is not None or self.tls_cert is not None or self.url.startswith("tls://"):
            given["tls"] = self._tls()
        return given

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"TLS: {error}") from None
        return context


async def connect(
    options: ConnectionOptions,
    name: str,
    *,
    reconnected: Callable[[], Awaitable[None]] | None = None,
    closed: Callable[[], Awaitable[None]] | None = None,
) -> Client:
    """A connection that comes back by itself whenever the server does.

    Args:
        options: Address and credentials.
        name: Name of the connection, for operators.
        reconnected: Called after each return.
        closed: Called when the connection is closed for good: by us, or by a server that does not
            let us in any more.

    Raises:
        StartupError: no server was there for `CONNECT_S`, or it does not let us in.
    """
    given = options.for_client()
    failures: list[Exception] = []

    async def failed(error: Exception) -> None:
        failures[:] = [error]
        logger.debug("NATS: %s", str(error) or type(error).__name__)

    async def disconnected() -> None:
        if not client.is_closed:
            logger.warning("NATS: disconnected")

    async def returned() -> None:
        logger.warning("NATS: connected again")
        if reconnected is not None:
            await reconnected()

    client = TolerantClient()
    connecting = client.connect(
        **given,
        name=name,
        error_cb=failed,
        disconnected_cb=disconnected,
        reconnected_cb=returned,
        closed_cb=closed,
        allow_reconnect=False,  # or a refusal of the server's would be tried again, for ever
        max_reconnect_attempts=-1,
        reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # any number of seconds is slept
        ping_interval=5,
        pending_size=PENDING_BYTES,
    )
    try:
        async with asyncio.timeout(CONNECT_S):
            await connecting
    except BaseException as error:  # of a caller that is cancelled, too: nothing is left of the attempt
        found = failures[-1] if failures else error
        with contextlib.suppress(asyncio.TimeoutError):  # after a failed TLS handshake it never ends
            async with asyncio.timeout(CLOSE_S):
                await client.close()
        if not isinstance(error, (TimeoutError, NatsError, OSError, ValueError)):
            raise
        raise StartupError(f"cannot connect to NATS at {options.shown_url}: {found or type(found).__name__}") from None
    client.options["allow_reconnect"] = True
    return client


async def disconnect(client: Client) -> None:
    """Send what waits, and close. What waits for a server that is away is lost."""
    try:
        with contextlib.suppress(NatsError, OSError, asyncio.TimeoutError):
            await client.flush(FLUSH_S)
    finally:
        with contextlib.suppress(OSError):  # the socket is closed, and nats-py writes to it
            await client.close()
