"""The front door's process while the machine misbehaves."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from ports import free_port

BODY_S = 1.0


PROGRAM = """
import resource, runpy, sys
if limits := sys.argv.pop(1):
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, limits.split())))
runpy.run_module("worker.frontdoor", run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def front_door(port: int, *arguments: str, limits: tuple[int, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A front door without frontends, and what it said; ``limits`` are those of descriptors."""
    command = [sys.executable, "-c", PROGRAM, " ".join(map(str, limits)), "--port", str(port)]
    command += ["--upstream", "http://127.0.0.1:1", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            while "front door on" not in said:
                said += process.stderr.readline()
                assert process.poll() is None, said
            yield process, said
        finally:
            process.kill()


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(60)
    return client


def test_what_came_while_it_was_stopped_is_not_late() -> None:
    """A machine that slept, or a frozen container: the client has sent all of it in time, more than
    is read at once.
    """
    port = free_port()
    body = json.dumps({"model": "none", "messages": [{"role": "user", "content": "Hello" * 40_000}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    half = len(request) // 2
    with front_door(port, "--body-timeout-s", str(BODY_S)) as (process, _):
        for rest, status in ((request[half:], 503), (b"", 408)):  # there is no frontend
            with connected(port) as client:
                client.sendall(request[:half])
                time.sleep(BODY_S / 4)
                process.send_signal(signal.SIGSTOP)
                client.sendall(rest)
                time.sleep(3 * BODY_S)
                process.send_signal(signal.SIGCONT)
                assert client.recv(100).startswith(b"HTTP/1.1 %d" % status)


def test_connections_have_descriptors_or_an_answer() -> None:
    """One that the system has no descriptor for would be closed without a word. The soft limit is
    raised: services and containers have a low one that means nothing.
    """
    port = free_port()
    with front_door(port, limits=(96, 192)) as (_, said), contextlib.ExitStack() as idle:
        assert "--max-connections is 80, not 4096: this process may have 192 open files" in said
        for _ in range(200):
            idle.enter_context(connected(port))
            time.sleep(0.02)
        for _ in range(8):
            with connected(port) as client:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 200")
