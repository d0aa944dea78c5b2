"""NATS and etcd for the tests of the boundary store: on loopback, at ports that stay the same."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
START_S = 60.0


class StoreServer:
    """A server that can be killed and started again where it was.

    Args:
        kind: ``nats`` or ``etcd``.
        directory: For state and log.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.port, self._peers = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """As ``--boundary-store`` takes it."""
        return f"{self.kind}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, cwd=self.directory)
        until = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.directory / "log").read_text()[-2000:])
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _command(self) -> list[str]:
        if self.kind == "nats":
            store = ["-js", "-sd", str(self.directory / "jetstream")]
            return [str(BIN / "nats-server"), "-a", "127.0.0.1", "-p", str(self.port), *store]
        client, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peers}"
        clients = ["--listen-client-urls", client, "--advertise-client-urls", client]
        cluster = ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        members = ["--initial-cluster", f"default={peers}", "--data-dir", str(self.directory / "data")]
        return [str(BIN / "etcd"), *clients, *cluster, *members, "--log-level", "error", "--unsafe-no-fsync"]

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.2).close()
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
