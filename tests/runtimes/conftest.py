from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import NatsServer

from worker.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for every test that does not stop it."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server for a test that stops it, or leaves traces in it."""
    server = NatsServer(tmp_path / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
