"""Ports of loopback for servers that a test starts a moment later, or again at the same place.

They are none of those that the kernel gives to connections, and each process that asks has its own:
a test that runs beside this one does not get the port between the question and the server's start.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

FIRST, LAST, BLOCK = 20_000, 31_999, 100
"""Above those that launch scripts choose from, and below 32768: the kernel's own begin there, and
ai-dynamo 1.4.2 reads its system port as a signed number of 16 bits.
"""


def free_port() -> int:
    """A port that nobody listens on, and that is asked for by nobody else."""
    return next(_ports)


def _every_port() -> Iterator[int]:
    for block in _blocks():
        for port in block:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            yield port


def _blocks() -> Iterator[range]:
    """Blocks of ports of this process alone, until it ends: each is the name of a socket of its."""
    starts = list(range(FIRST, LAST, BLOCK))
    random.SystemRandom().shuffle(starts)
    for start in starts:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0dynamo-logits-worker-test-ports-{start}")
        except OSError:  # another process has it
            claim.close()
        else:
            os.set_inheritable(claim.detach(), False)
            yield range(start, start + BLOCK)
    raise RuntimeError(f"no port from {FIRST} to {LAST} is left")


_ports = _every_port()
