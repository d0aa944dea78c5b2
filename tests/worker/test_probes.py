"""The port of metrics and health, before clients that are none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
import urllib.request
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from ports import free_port
from prometheus_client import CollectorRegistry
from system_faults import no_descriptors

from worker.runtimes.direct import probes
from worker.runtimes.direct.probes import ProbeServer
from worker.server.connection_threads import ACCEPT_PAUSE_S, MOST_WAITING


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    port = free_port()
    server = ProbeServer("127.0.0.1", port, CollectorRegistry(), lambda: None, lambda: None)
    yield port
    await server.close()


def live(port: int) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/live") as answer:
        return int(answer.status)


async def test_a_client_that_says_nothing_fills_no_log(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    def wait() -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /li")
            return client.recv(1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(probes._Handler, "timeout", 0.05)
        assert await asyncio.to_thread(wait) == b""
    assert await asyncio.to_thread(live, port) == 200
    assert capfd.readouterr().err == ""


async def test_a_client_that_breaks_off_fills_no_log(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    def break_off() -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /li")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    await asyncio.to_thread(break_off)
    assert await asyncio.to_thread(live, port) == 200
    assert capfd.readouterr().err == ""


async def test_a_process_without_descriptors_rests(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be accepted stays readable; it is answered once it can be."""
    attempts = 0
    accept = socket.socket.accept

    def counted(listening: socket.socket) -> object:
        nonlocal attempts
        attempts += 1
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", counted)
    with socket.socket() as client:
        with no_descriptors():
            client.connect(("127.0.0.1", port))
            began_s = time.monotonic()
            await asyncio.sleep(0.5)
            assert 1 <= attempts <= (time.monotonic() - began_s) / ACCEPT_PAUSE_S + 1
        client.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        client.settimeout(60)
        assert b"200 OK" in await asyncio.to_thread(client.recv, 100)


async def test_clients_that_say_nothing_are_so_many(port: int) -> None:
    """They would take all descriptors of a worker, with which it then takes no request."""

    def come() -> list[bytes]:
        with contextlib.ExitStack() as stack:
            many = range(MOST_WAITING + 8)
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in many]
            assert live(port) == 200
            return [client.recv(1) for client in clients[:8]]

    assert await asyncio.to_thread(come) == [b""] * 8
