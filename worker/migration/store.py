"""The boundary store: a small key-value store with a time to live that a pool of workers shares."""

from __future__ import annotations

from typing import Protocol

from worker.errors import StartupError

TTL_S = 300.0
"""Seconds after which a record goes away that nobody has written again: far longer than it takes to
notice that a worker died and to migrate what it served.
"""


class StoreError(Exception):
    """The store could not do what it was asked; the message says which one, and why."""


class BoundaryStore(Protocol):
    """Keeps the records; for one event loop.

    Each operation raises `StoreError` if the store does not answer, and works again when it does.
    Keys are hexadecimal digits, values small.

    Attributes:
        address: Names it in errors.
    """

    address: str

    async def open(self) -> None:
        """Called once, before all else. A store that cannot be reached now may be later.

        Raises:
            StartupError: it will never be reached as it is configured.
        """

    async def get(self, key: str) -> bytes | None:
        """The value, None if there is none."""

    async def put(self, key: str, value: bytes) -> None:
        """Write the value; it goes away after `TTL_S`."""

    async def delete(self, key: str) -> None:
        """Remove the value, if there is one."""

    async def close(self) -> None:
        """Let go of connections. Idempotent."""


def make_store(address: str) -> BoundaryStore:
    """The store of ``--boundary-store``, not open yet.

    Raises:
        StartupError: it will never be reached as it is configured.
    """
    kind, _, place = address.partition(":")
    if kind == "file":
        from worker.migration.file_store import FileStore

        return FileStore(place)
    if kind == "nats":
        from worker.migration.nats_store import NatsStore

        return NatsStore(f"nats:{place}" if place.startswith("//") else place)
    if kind == "etcd":
        from worker.migration.etcd_store import EtcdStore

        return EtcdStore(f"http:{place}" if place.startswith("//") else place)
    raise StartupError(f"--boundary-store {address}: must be file:DIRECTORY, nats:URL or etcd:URL")
