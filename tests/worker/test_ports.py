"""Ports for the servers of tests, which two halves of the tests ask for at the same time."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import ports

PROGRAM = """
import ports
print(*(ports.free_port() for _ in range(150)))
input()
"""


def test_no_port_is_given_twice() -> None:
    """Neither by one process nor by three that run beside each other."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONPATH": str(Path(ports.__file__).parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    found = [ports.free_port() for _ in range(10)]
    for each in programs:
        assert each.stdout is not None
        found += map(int, each.stdout.readline().split())
    for each in programs:
        each.communicate("\n")
    assert len(set(found)) == len(found) == 460
    assert all(ports.FIRST <= port <= ports.LAST for port in found)


def test_a_port_that_somebody_listens_on_is_not_given() -> None:
    first = ports.free_port()
    while (first + 1) % ports.BLOCK == 0:  # the next one is another block's
        first = ports.free_port()
    with socket.create_server(("127.0.0.1", first + 1)):
        assert ports.free_port() != first + 1
