"""Processes that are stopped so that what another one sent stays where it is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from e2e_stack import Process, wait_for


@contextlib.contextmanager
def stopped(*processes: Process) -> Iterator[None]:
    """They do nothing meanwhile."""
    for process in processes:
        process.signal(signal.SIGSTOP)
    try:
        for process in processes:
            wait_for(lambda process=process: stands_still(process), "that it stands still")
        yield
    finally:
        for process in processes:
            if process.running:
                process.signal(signal.SIGCONT)


def stands_still(process: Process) -> bool:
    """Whether every thread of it has stopped: one that runs on another processor goes on for a
    moment after the signal.
    """
    stats = []
    for path in Path(f"/proc/{process.child.pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            stats.append(path.read_text())
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def unread(receiver: Process, sender: Process) -> int:
    """Bytes on TCP connections between two processes that the receiver has not read; it must be
    stopped.
    """
    sent = {(local, remote) for local, remote, _ in connections(sender)}
    return sum(waiting for local, remote, waiting in connections(receiver) if (remote, local) in sent)


def connections(process: Process) -> list[tuple[str, str, int]]:
    """Both addresses of each established connection, and the bytes received and not read."""
    links = set()
    for path in Path(f"/proc/{process.child.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(path))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [row for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in links]
    return [(row[1], row[2], int(row[4].partition(":")[2], 16)) for row in established]
