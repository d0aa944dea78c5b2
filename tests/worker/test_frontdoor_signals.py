"""Signals to a front door's process while it starts, and while it drains."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ports import free_port

STARTS = """
import sys, time
from worker.importing import prepare
prepare(uses_torch=False)
from worker.frontdoor import process
from worker.frontdoor.openengine import opening

def load(options):
    print("loads", flush=True)
    time.sleep(600)

opening.open_engines = load
sys.exit(process.main(sys.argv[1:]))
"""

SERVES = """
import sys
from worker.importing import prepare
prepare(uses_torch=False)
from worker.frontdoor import process
sys.exit(process.main(sys.argv[1:]))
"""


@contextmanager
def front_door(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The process, whose output and log are one."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, "it has ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_starts_ends_at_once(number: signal.Signals) -> None:
    """Nothing is under way, and what it loads may take long."""
    with front_door(STARTS, "--upstream", "grpc://127.0.0.1:1", "--model-path", "/none") as process:
        read_until(process, "loads")
        process.send_signal(number)
        assert process.wait(30) == 128 + number


def test_a_second_signal_ends_the_drain() -> None:
    """By a handler: the first process of a container is ended by no other signal but SIGKILL."""
    with socket.create_server(("127.0.0.1", 0)) as frontend:
        url, port = f"http://127.0.0.1:{frontend.getsockname()[1]}", free_port()
        with front_door(SERVES, "--upstream", url, "--host", "127.0.0.1", "--port", str(port)) as process:
            read_until(process, "front door on")
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                asked, _ = frontend.accept()
                with asked:
                    assert asked.recv(1)
                    process.terminate()
                    with pytest.raises(subprocess.TimeoutExpired):
                        process.wait(0.5)
                    process.terminate()
                    assert process.wait(30) == 128 + signal.SIGTERM
