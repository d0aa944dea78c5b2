"""Starts worker and frontend processes out of one that has imported what they import.

An import of torch, transformers and Dynamo takes seconds of CPU time, and these tests start some
hundred processes. A process that is started here is forked from one that has done the imports and
nothing else: one thread, nothing computed, no file open. From there on it is a process like any
other, with its own environment, arguments and log.

``python warm_start.py SOCKET`` takes one JSON object per connection: ``argv`` as after ``python``,
``environ`` and ``log``, and file descriptors to inherit, whose numbers are added to ``argv``. It
answers with a line that has the pid, and at the end with one that has the exit status, negative
for a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_JOB = 2**20
IMPORTS = (
    "adapters",
    "dynamo.frontend.main",
    "transformers.models.llama.modeling_llama",
    "worker.runtimes.dynamo_engine",
    "worker.engines.embedded",
)


class WarmProcess:
    """A process that was started here, with the part of `subprocess.Popen` that tests need.

    Args:
        argv: Arguments behind ``python``.
        environ: The whole environment.
        log: File of its output; by default that of this process.
        fds: File descriptors that it inherits; their numbers there are added to `argv`.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], log: Path | None = None, fds: Sequence[int] = ()
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(_server())
        self._lines = self._connection.makefile("r")
        if log is not None:
            log.touch()  # whoever reads it at once finds it
        job = {"argv": list(argv), "environ": dict(environ), "log": log and str(log)}
        socket.send_fds(self._connection, [json.dumps(job).encode()], fds)
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is about to be told
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> str:
    """The address of this session's server, which ends with the session."""
    directory = tempfile.TemporaryDirectory(prefix="dlw-warm-")
    address = f"{directory.name}/socket"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, address]
    server = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the process that others are forked from did not start"

    @atexit.register
    def end() -> None:
        server.communicate()  # the end of its standard input is its own
        directory.cleanup()

    return address


def _serve(address: str) -> dict[str, Any] | None:
    """Fork for every job. Returns the job in the process that does it, None at the end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    running: dict[int, tuple[int, socket.socket]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    os.write(1, b"ready\n")
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return None
            if key.fileobj is listener:
                connection, _ = listener.accept()
                data, fds, _, _ = socket.recv_fds(connection, MAX_JOB, 8)
                job: dict[str, Any] = json.loads(data)
                pid = os.fork()
                if pid == 0:
                    for other in (connection, listener, *(one for _, one in running.values())):
                        other.close()
                    for descriptor in running:
                        os.close(descriptor)
                    selector.close()
                    return {**job, "argv": [*job["argv"], *map(str, fds)]}
                for descriptor in fds:
                    os.close(descriptor)
                connection.sendall(b"%d\n" % pid)
                descriptor = os.pidfd_open(pid)
                running[descriptor] = pid, connection
                selector.register(descriptor, selectors.EVENT_READ)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, connection = running.pop(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection:
                    connection.sendall(b"%d\n" % status)


def _become(job: Mapping[str, Any]) -> None:
    """Run a job as ``python`` would have, had it been started for it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if job["log"] else 2
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.clear()
    os.environ.update(job["environ"])
    first, *rest = job["argv"]
    paths = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    sys.path[0] = os.getcwd() if first == "-m" else str(Path(first).parent)
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTS:
        __import__(name)
    job = _serve(sys.argv[1])
    if job is not None:
        _become(job)
