"""Signals to a launch script, and what its environment must not change, with programs that do
nothing in place of frontend and workers; `test_agg_script.py` has real ones.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from launched_script import REPOSITORY

SCRIPT = """
set -euo pipefail
usage() {{ :; }}
source {launch}/lib.sh
status_of_sigterm[first]=143
prepare_runtime
start first sleep 60
set -o functrace
trap '{signals}' DEBUG
start second sleep 60
watch
"""


def run(directory: Path, signals: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (directory / "tmp").mkdir()
    script = directory / "script.sh"
    script.write_text(SCRIPT.format(launch=REPOSITORY / "launch", signals=signals))
    return subprocess.run(
        ["env", "--default-signal=INT", "bash", str(script)],  # where it is ignored, as in the background, it stays so
        env=os.environ | {"TMPDIR": str(directory / "tmp")} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def children_of(directory: Path) -> list[psutil.Process]:
    """Processes of a script that has ended."""
    found = psutil.process_iter(["environ"])
    return [each for each in found if str(directory) in (each.info["environ"] or {}).get("TMPDIR", "")]


@pytest.mark.parametrize(
    "signals",
    [
        "[[ $BASH_COMMAND != process_pids* ]] || kill -INT $$",
        "[[ $BASH_COMMAND != process_pids* && $BASH_COMMAND != say* ]] || kill -INT $$",
        "[[ $BASH_COMMAND != process_pids* && $BASH_COMMAND != exit* ]] || kill -INT $$",
    ],
    ids=["before it is noted", "twice", "again at the end"],
)
def test_ctrl_c_as_a_process_begins_leaves_nothing(tmp_path: Path, signals: str) -> None:
    ended = run(tmp_path, signals)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert "stopping; Ctrl-C again to kill" in ended.stdout
    assert not list((tmp_path / "tmp").iterdir())
    psutil.wait_procs(children_of(tmp_path), timeout=10)
    assert not children_of(tmp_path)


def test_cdpath_changes_nothing(tmp_path: Path) -> None:
    """With it ``cd launch/..`` may go elsewhere, and writes where it went."""
    (tmp_path / "launch").mkdir()
    found = subprocess.run(
        ["bash", "-c", 'set --; usage() { :; }; source launch/lib.sh; echo "$repository"; trap - EXIT'],
        cwd=REPOSITORY,
        env=os.environ | {"CDPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"{REPOSITORY}\n"
