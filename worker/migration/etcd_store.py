"""A boundary store in etcd, by the JSON gateway of its gRPC interface."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from worker.errors import StartupError, without_user
from worker.migration.store import TTL_S, StoreError

T = TypeVar("T")

PREFIX = "dynamo-logits-worker/boundaries/"

NUM_THREADS = 4
"""Connections; each has a thread."""

TIMEOUT_S = 2.0

LEASE_NOT_FOUND = "requested lease not found"


class EtcdStore:
    """Records with leases: a lease is used for half of the time to live, and then another.

    Args:
        url: URL of the server, such as ``http://127.0.0.1:2379``.
        ttl_s: Seconds after which a record goes away, at the earliest.

    Raises:
        StartupError: the URL is none of HTTP, or has a user, which the store does not log in as.
    """

    def __init__(self, url: str, ttl_s: float = TTL_S) -> None:
        self.address = f"etcd:{without_user(url)}"
        place = _place(url)
        if place is None:
            problem = "must be etcd:http://HOST:PORT or etcd:https://HOST:PORT, without a user"
            raise StartupError(f"--boundary-store {self.address}: {problem}")
        scheme, self._host, self._port = place
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._ttl_s = ttl_s
        self._lease: tuple[str, float] | None = None  # id, and when it was granted
        self._idle: list[http.client.HTTPConnection] = []
        self._is_closed = False
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="boundary-store")

    async def open(self) -> None:
        """Do nothing: etcd may come up after its clients."""

    async def get(self, key: str) -> bytes | None:
        """See `BoundaryStore.get`."""
        found = await self._run(lambda: self._ask("kv/range", key=_encoded(key)))
        values = found.get("kvs", [])
        return base64.b64decode(values[0]["value"]) if values else None

    async def put(self, key: str, value: bytes) -> None:
        """See `BoundaryStore.put`."""
        await self._run(lambda: self._put(key, value))

    async def delete(self, key: str) -> None:
        """See `BoundaryStore.delete`."""
        await self._run(lambda: self._ask("kv/deleterange", key=_encoded(key)))

    async def close(self) -> None:
        """See `BoundaryStore.close`."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreError(f"{self.address}: {str(error) or type(error).__name__}") from None
        except RuntimeError:  # the threads have been shut down
            raise StoreError(f"{self.address}: it is closed") from None

    def _put(self, key: str, value: bytes) -> None:
        written = {"key": _encoded(key), "value": base64.b64encode(value).decode()}
        try:
            self._ask("kv/put", **written, lease=self._current_lease())
        except ValueError as error:
            if LEASE_NOT_FOUND not in str(error):
                raise
            self._lease = None  # etcd has lost it
            self._ask("kv/put", **written, lease=self._current_lease())

    def _current_lease(self) -> str:
        now_s, lease = time.monotonic(), self._lease
        if lease is None or now_s - lease[1] > self._ttl_s / 2:
            granted = self._ask("lease/grant", TTL=max(1, round(1.5 * self._ttl_s)))
            lease = self._lease = (str(granted["ID"]), now_s)
        return lease[0]

    def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """The answer to a request; one that a kept connection loses is asked again."""
        body = json.dumps(fields)
        while self._idle:
            try:
                return self._exchange(self._idle.pop(), what, body)
            except (ConnectionError, http.client.HTTPException, IndexError):
                continue
        return self._exchange(self._connect(), what, body)

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)

    def _exchange(self, connection: http.client.HTTPConnection, what: str, body: str) -> dict[str, Any]:
        try:
            connection.request("POST", f"/v3/{what}", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found: Any = json.loads(response.read())
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if self._is_closed:
            connection.close()
        if response.status != 200 or not isinstance(found, dict):
            problem = found.get("message") or found.get("error") if isinstance(found, dict) else found
            raise ValueError(f"{response.status} {problem}")
        return found


def _place(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port of a URL of HTTP; None if it is none, or has a user."""
    try:
        parts = urlsplit(url)
        port = parts.port or 2379
    except ValueError:  # its port is no number, or its host is not whole
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        return None
    return parts.scheme, parts.hostname, port


def _encoded(key: str) -> str:
    return base64.b64encode(f"{PREFIX}{key}".encode()).decode()
