"""The boundary store: a small key-value store with a time to live that a pool of workers shares."""

from __future__ import annotations

from typing import Protocol

TTL_S = 300.0
"""Seconds after which a record goes away unless it is written again: far longer than it takes to
notice that a worker died and to migrate its requests.
"""


class StoreError(Exception):
    """The store could not do what it was asked; the message says which one, and why."""


class BoundaryStore(Protocol):
    """Keeps the records; for one event loop.

    Each operation raises `StoreError` if the store does not answer, and works again when it does.
    Keys are hexadecimal digits, values small.

    Attributes:
        address: Name of the store in errors, which clients may see: without passwords.
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
        """Close connections. Idempotent."""
