"""The choice of the boundary store by the address that ``--boundary-store`` names."""

from __future__ import annotations

from worker.errors import StartupError, without_user
from worker.migration.store import BoundaryStore


def make_store(address: str) -> BoundaryStore:
    """The store at an address, not open yet; its client library is imported here.

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
    raise StartupError(f"--boundary-store {without_user(address)}: must be file:DIRECTORY, nats:URL or etcd:URL")
