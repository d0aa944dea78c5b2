"""Ends vLLM's processes with the worker: one that is killed would leave them, with the device's
memory, for good.

Each of vLLM's processes calls `end_with_worker` before it greets the worker or loads anything: a
forked one by a hook of `name_worker`, and a spawned one while it imports vLLM, as a platform plugin
that finds no platform. The worker's processors call it again, for an installation whose plugins are
restricted (``VLLM_PLUGINS``).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

WORKER_PID = "DLW_VLLM_WORKER_PID"
"""Environment variable: process id of the worker that vLLM's processes belong to."""

WATCH = "worker-watch"
"""Name of the thread that waits for the worker's end."""

POLL_S = 1.0
"""Pause between looks at the worker where the system has no file descriptors of processes."""


def name_worker(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell processes that this one starts which worker they belong to."""
    environ[WORKER_PID] = str(os.getpid())
    _watch_forks()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=end_with_worker)


def end_with_worker() -> None:
    """Kill this process, and the engine's process between it and the worker, once the worker has
    ended; nothing if no worker named itself. Idempotent.
    """
    worker = int(os.environ.get(WORKER_PID, "0"))
    if worker in (0, os.getpid()) or any(thread.name == WATCH for thread in threading.enumerate()):
        return
    parent = os.getppid()
    between = parent if parent_of(parent) == worker else None

    def wait() -> None:
        _wait_for_end(worker)
        for pid in (between, os.getpid()):
            if pid is not None and (pid != between or os.getppid() == between):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=wait, name=WATCH, daemon=True).start()


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or a sandbox without it
        while _is_alive(pid):
            time.sleep(POLL_S)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parent_of(pid: int) -> int | None:
    """The parent of a process, None where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])
