"""What the launch scripts of several workers do about a worker that ends, with programs in place
of frontend and workers that do nothing; `test_disagg_scripts.py` has real ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_script import REPOSITORY, ScriptOutput

SCRIPT = """
set -euo pipefail
usage() {{ :; }}
source {launch}/several.sh
worker_python={worker}
MODEL_PATH="a model"
restart_after_s=1
prepare_pool_secret
status_of_sigterm[frontend]=143
start frontend sleep 60
start_workers prefill 1 --of prefill
start_workers decode 2 --of "the second"
{prelude}
watch
"""

WORKER = """#!/usr/bin/env bash
trap 'exit 0' TERM
echo "worker $$: ${#DLW_POOL_SECRET} characters, $*"
# Not one long wait: a signal that comes as bash begins it is handled when that ends.
for _ in {1..600}; do sleep 0.1; done
"""


class Script(ScriptOutput):
    """The script, and the workers that it starts."""

    def worker(self) -> tuple[int, str]:
        """Pid and arguments of the next worker that it starts."""
        found = re.search(r"worker (\d+): 64 characters, (.*)", self.read_until("characters"))
        assert found, self.lines
        return int(found[1]), found[2]


@contextlib.contextmanager
def running(directory: Path, max_restarts: int, program: str = WORKER, prelude: str = "") -> Iterator[Script]:
    worker = directory / "worker"
    worker.write_text(program)
    worker.chmod(0o700)
    script = directory / "script.sh"
    script.write_text(SCRIPT.format(launch=REPOSITORY / "launch", worker=worker, prelude=prelude))
    process = subprocess.Popen(
        ["bash", str(script)],
        env=os.environ | {"MAX_RESTARTS": str(max_restarts)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started = Script(process, [])
    try:
        yield started
    finally:
        process.terminate()
        process.wait(timeout=60)
        started.join()


def by_role(script: Script) -> dict[str, list[int]]:
    """Pids of the three workers."""
    found: dict[str, list[int]] = {"prefill": [], "the second": []}
    for _ in range(3):
        pid, arguments = script.worker()
        assert arguments.startswith("-m worker --model-path a model --of ")
        found[arguments.partition("--of ")[2]].append(pid)
    return found


def test_a_killed_worker_is_started_again_as_it_was(tmp_path: Path) -> None:
    with running(tmp_path, max_restarts=1) as script:
        (prefill,), decode = by_role(script).values()
        os.kill(prefill, signal.SIGKILL)
        script.read_until("script: the prefill 1 ended with status 137; it is started again in 1 s")
        again, arguments = script.worker()
        assert arguments == "-m worker --model-path a model --of prefill"
        os.kill(again, signal.SIGKILL)
        script.read_until("the prefill 1 ended with status 137; it is not started again")
        script.read_until("error: that was the last prefill; stopping")
        assert script.process.wait(60) == 1
        for pid in decode:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_worker_that_was_told_to_end_is_replaced_at_once(tmp_path: Path) -> None:
    with running(tmp_path, max_restarts=0) as script:
        _, (leaving, _) = by_role(script).values()
        for _ in range(2):
            os.kill(leaving, signal.SIGTERM)
            script.read_until("ended with status 0; it is started again in 0 s")
            leaving, arguments = script.worker()
            assert arguments == "-m worker --model-path a model --of the second"


@pytest.mark.parametrize(("ends", "status"), [("exit 1", 0), ("trap - TERM; kill $$", 0), ("exit 3", 1)])
def test_a_worker_that_still_loads_ends_as_it_does(tmp_path: Path, ends: str, status: int) -> None:
    """With 1 where it had begun with its model, and by the signal before."""
    program = WORKER.replace("trap 'exit 0' TERM", f"trap '{ends}' TERM")
    with running(tmp_path, max_restarts=0, program=program) as script:
        by_role(script)
        script.process.terminate()
        assert script.process.wait(60) == status


def test_the_others_go_on_without_a_worker_that_died_too_often(tmp_path: Path) -> None:
    with running(tmp_path, max_restarts=0) as script:
        _, decode = by_role(script).values()
        os.kill(decode[0], signal.SIGKILL)
        script.read_until("ended with status 137; it is not started again")
        os.kill(decode[1], signal.SIGTERM)
        script.read_until("ended with status 0; it is started again in 0 s")
        script.worker()
        script.process.terminate()
        assert script.process.wait(60) == 0


def test_a_clock_that_is_set_back_delays_no_worker(tmp_path: Path) -> None:
    """By two hours at each look: to bash, setting SECONDS is as setting the machine's clock."""
    prelude = 'sleep() { SECONDS=$((SECONDS - 7200)); command sleep "$@"; }'
    with running(tmp_path, max_restarts=1, prelude=prelude) as script:
        (prefill,), _ = by_role(script).values()
        os.kill(prefill, signal.SIGKILL)
        script.read_until("it is started again in 1 s")
        begun = time.monotonic()
        assert script.worker()[1] == "-m worker --model-path a model --of prefill"
        assert 0.5 < time.monotonic() - begun
