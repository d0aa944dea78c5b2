"""First steps of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
pid = os.getpid()
os.getpid = lambda: {pid}
from worker.importing import prepare
prepare({{}}, uses_torch=False)
{then}
os.kill(pid, signal.SIGTERM)
signal.pause()
"""


@pytest.mark.parametrize(
    ("pid", "then", "status"),
    [
        ("1", "", 128 + signal.SIGTERM),
        ("1", "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))", 3),
        ("pid", "", -signal.SIGTERM),
    ],
    ids=["first of a container", "with a handler by then", "any other"],
)
def test_sigterm_ends_a_process_that_begins(pid: str, then: str, status: int) -> None:
    """The kernel gives the first process of a container no signal that it does not handle: it would
    start, and serve until it is killed.
    """
    program = PROGRAM.format(pid=pid, then=then)
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=60, check=False)
    assert ended.returncode == status
