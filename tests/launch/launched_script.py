"""Runs a launch script as a user does at a terminal, in a home, cache and temporary directory of
its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import openai
import psutil
from ports import free_port

from worker.tiny_model import write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
READY = re.compile(r"ready\. (?P<model>\S+) answers at (?P<url>\S+);")


@dataclass
class ScriptOutput:
    """A script at work, and the lines of its output that a test has read so far.

    A thread takes them from the pipe: a frontend that logs each request would fill it, and wait.
    """

    process: subprocess.Popen[str]
    lines: list[str]

    def __post_init__(self) -> None:
        self._unread: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._unread.put(line)
        self._unread.put(None)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def read_line(self) -> str | None:
        """The next line; None at the end of the output."""
        line = self._unread.get()
        if line is None:
            self._unread.put(None)
        else:
            self.lines.append(line)
        return line

    def read_until(self, text: str) -> str:
        """Read what it prints up to a line with ``text``; that line."""
        while (line := self.read_line()) is not None:
            if text in line:
                return line
        raise AssertionError(f"ended with {self.process.wait()}:\n{self.output}")

    def read_rest(self) -> None:
        """Read what it prints until its end."""
        while self.read_line() is not None:
            pass

    def join(self) -> None:
        """Wait for the end of its output, which then is closed."""
        self._reader.join()


@dataclass
class LaunchedScript(ScriptOutput):
    port: int
    directory: Path
    model: str = ""
    url: str = ""

    def wait_until_ready(self) -> None:
        """Raises `AssertionError` with the output if the script ends first."""
        found = READY.search(self.read_until("ready. "))
        assert found, self.output
        self.model, self.url = found["model"], found["url"]

    def run_printed_curl(self) -> str:
        """The answer to the request that it prints behind the line that says it is ready."""
        command = ""
        while not command.endswith("}'\n"):
            line = self.read_line()
            assert line, "ended"
            command += line
        program = f"{command.strip()} -sf"
        return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def named(self, module: str) -> psutil.Process:
        """The child that runs ``python -m module``."""
        (found,) = self.all_named(module)
        return found

    def all_named(self, module: str) -> list[psutil.Process]:
        """The children that run ``python -m module``."""
        return [child for child in self.children() if f"-m {module} " in _command_line(child)]

    def probe(self) -> psutil.Process:
        """What waits for the model, once it does."""
        while True:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if "await_model.py" in _command_line(child):
                    return child
            time.sleep(0.02)

    def children(self) -> list[psutil.Process]:
        """Frontend, front door and worker, and not the ``sleep`` that the script is in."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in below if " -m " in _command_line(child)]

    def listening(self) -> list[str]:
        return [
            connection.laddr.ip
            for child in self.children()
            for connection in child.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> int:
        """Read what it still prints; its exit status."""
        self.read_rest()
        return self.process.wait()

    def assert_nothing_left(self, children: list[psutil.Process]) -> None:
        assert [child for child in children if child.is_running()] == []
        assert list((self.directory / "tmp").iterdir()) == []
        assert not (self.directory / "home/.cache").exists()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0


@cache
def tiny_model() -> Path:
    """The model that ``MODEL_PATH=tiny`` would make, made once: a script takes seconds for it."""
    directory = Path(tempfile.mkdtemp(prefix="launched-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return write_tiny_model(directory / "tiny-model")


@contextlib.contextmanager
def launched(
    directory: Path, *arguments: str, variables: Mapping[str, str] | None = None, script: str = "agg.sh"
) -> Iterator[LaunchedScript]:
    """A launch script at work, with `tiny_model` unless `variables` say otherwise; killed with
    everything it started if the test leaves it running.
    """
    for name in ("tmp", "home", "cache"):
        (directory / name).mkdir(exist_ok=True)
    port = free_port()
    environment = os.environ | {
        "DLW_VENV": sys.prefix,
        "HOME": str(directory / "home"),
        "HTTP_PORT": str(port),
        "MODEL_PATH": str(tiny_model()),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(directory / "tmp"),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and would be in the script
    process = subprocess.Popen(
        [str(REPOSITORY / "launch" / script), *arguments],
        cwd=directory,
        env=environment | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # tests in the background of a shell inherit that Ctrl-C is ignored; scripts of users do not
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    running = LaunchedScript(process, [], port, directory)
    try:
        yield running
    finally:
        _kill(process)
        running.join()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one too
        return ""


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None  # gRPC's sockets are of both
    return (mapped or found).is_loopback
