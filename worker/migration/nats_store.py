"""A boundary store in a key-value bucket of NATS JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import nats
from nats.aio.client import Client
from nats.js.errors import BucketNotFoundError, KeyNotFoundError
from nats.js.kv import KeyValue

from worker.arguments.values import is_host
from worker.errors import StartupError, without_user
from worker.migration.store import TTL_S, StoreError

logger = logging.getLogger(__name__)

BUCKET = "dynamo-logits-worker-boundaries"

INBOX = "_INBOX.dlw-worker"
"""Prefix of the inboxes of workers: apart from those of clients, to which workers answer."""

RECONNECT_S = 0.25
"""Pause between two attempts to connect again."""


class NatsStore:
    """One connection, which comes back by itself; the bucket is made where it is missing.

    Args:
        url: URL of the server, such as ``nats://127.0.0.1:4222``.
        ttl_s: Seconds after which a record goes away; of a bucket that is there already, its own.
        bucket: Name of the bucket.

    Raises:
        StartupError: the URL is none of one server.
    """

    def __init__(self, url: str, ttl_s: float = TTL_S, bucket: str = BUCKET) -> None:
        self._url = url if "://" in url else f"nats://{url}"
        self.address = without_user(self._url)
        if not _is_of_one_server(self._url):
            raise StartupError(f"--boundary-store {self.address}: must be nats:URL, the URL of one server")
        self._name = bucket
        self._ttl_s = ttl_s
        self._client: Client | None = None
        self._bucket: KeyValue | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Do nothing: the server may come up after its clients."""

    async def get(self, key: str) -> bytes | None:
        """See `BoundaryStore.get`."""
        async with self._ready() as bucket:
            try:
                return (await bucket.get(key)).value
            except KeyNotFoundError:
                return None

    async def put(self, key: str, value: bytes) -> None:
        """See `BoundaryStore.put`."""
        async with self._ready() as bucket:
            await bucket.put(key, value)

    async def delete(self, key: str) -> None:
        """See `BoundaryStore.delete`."""
        async with self._ready() as bucket:
            await bucket.delete(key)

    async def close(self) -> None:
        """See `BoundaryStore.close`."""
        client, self._client, self._bucket = self._client, None, None
        if client is not None:
            await _end(client)

    @asynccontextmanager
    async def _ready(self) -> AsyncIterator[KeyValue]:
        """The bucket; what the library raises becomes a `StoreError`."""
        try:
            async with self._opening:
                bucket = self._bucket or await self._open_bucket()
            yield bucket
        except (nats.errors.Error, OSError) as error:
            self._bucket = None  # the server may have lost it: it is looked for, and made again
            raise StoreError(f"{self.address}: {str(error) or type(error).__name__}") from None

    async def _open_bucket(self) -> KeyValue:
        client = await self._connected()
        stream: Any = client.jetstream()
        try:
            self._bucket = await stream.key_value(self._name)
        except BucketNotFoundError:
            self._bucket = await stream.create_key_value(bucket=self._name, ttl=self._ttl_s, history=1)
        assert self._bucket is not None
        return self._bucket

    async def _connected(self) -> Client:
        if self._client is None or self._client.is_closed:  # by a server that did not let it in
            self._client, client = None, Client()
            try:
                await client.connect(
                    self._url,
                    connect_timeout=1,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]  # any number of seconds is slept
                    pending_size=0,  # while it is away, nothing is kept to be written late
                    error_cb=_note,
                    name="dynamo-logits-worker",
                    inbox_prefix=INBOX,
                )
            except BaseException:  # who waits has waited long enough
                await _end(client)
                raise
            self._client = client
        return self._client


async def _end(client: Client) -> None:
    with contextlib.suppress(OSError):  # the server is away, and nats-py writes to the closed socket
        await client.close()


def _is_of_one_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return is_host(parts.hostname or "") and (parts.port is None or parts.port > 0) and "," not in parts.netloc
    except ValueError:  # its port is no number, or its host is not whole
        return False


async def _note(error: Exception) -> None:
    logger.debug("NATS: %s", error)
