"""vLLM's processes end with a worker that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from worker.parent_watch import WORKER_PID, end_with_worker

REPOSITORY = Path(__file__).resolve().parents[2]
INNER = "import worker.parent_watch as p; {without}; p.end_with_worker(); p.end_with_worker(); print('up', flush=True)"
SLEEP = "import time; time.sleep(600)"
MIDDLE = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); " + SLEEP
OUTER = (
    "import subprocess, sys; from worker.parent_watch import name_worker; name_worker(); "
    "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]]); " + SLEEP
)
FORKED = (
    "import os; from worker.parent_watch import name_worker; name_worker(); os.fork() and print('up', flush=True); "
    + SLEEP
)


@pytest.mark.parametrize("without", ["pass", "p.POLL_S = 0.05; del p.os.pidfd_open"])
def test_a_killed_worker_leaves_nothing(without: str) -> None:
    inner = f"{INNER.format(without=without)}; {SLEEP}"
    check_that_none_is_left([sys.executable, "-c", OUTER, MIDDLE, inner], 2)


def test_a_forked_process_watches_from_the_first_line_on() -> None:
    check_that_none_is_left([sys.executable, "-c", FORKED], 1)


def check_that_none_is_left(command: list[str], count: int) -> None:
    """A worker with that many processes below it is killed, and takes them with it."""
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
        below = psutil.Process(worker.pid).children(recursive=True)
        assert len(below) == count
        worker.kill()
        worker.wait()
        assert psutil.wait_procs(below, timeout=60)[1] == []


def test_without_a_worker_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKER_PID, raising=False)
    monkeypatch.setattr("threading.Thread", None)
    end_with_worker()
