"""Signals to a launch script, and what its environment must not change, with programs that do
nothing in place of frontend and workers; `test_agg_script.py` has real ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched_script import REPOSITORY
from ports import free_port

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


INSTALL = """#!/usr/bin/env bash
[[ $* == *"$WHICH"* ]] || exit 0
sleep 60 &
trap 'kill "$!"; exit 143' TERM
kill -s "$1" "$2"
wait
"""


@pytest.mark.parametrize(("signal", "status"), [("TERM", 143), ("INT", 130), ("HUP", 129), ("KILL", -9)])
@pytest.mark.parametrize(("script", "which"), [("agg.sh", "--runtime-only"), ("agg_openengine.sh", "--dynamo")])
def test_an_installation_ends_with_its_script(
    tmp_path: Path, script: str, which: str, signal: str, status: int
) -> None:
    """It takes minutes at first."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    (tmp_path / "scripts").mkdir()
    install = tmp_path / "scripts/install"
    install.write_text(INSTALL.replace("$1", signal).replace("$2", "$(cat $TMPDIR/script)"))
    install.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    begun = time.monotonic()
    ended = subprocess.run(
        ["env", "--default-signal=INT,HUP", "bash", "-c", f'echo $$ > "$TMPDIR/script"; exec launch/{script}'],
        cwd=tmp_path,
        env=os.environ
        | {"TMPDIR": str(tmp_path / "tmp"), "HTTP_PORT": str(free_port()), "FRONT_DOOR_BATCH_DIR": "off"}
        | {"WHICH": which, "DLW_VENV": "", "DLW_DYNAMO_VENV": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == status
    _, alive = psutil.wait_procs(children_of(tmp_path), timeout=10)
    assert not alive
    assert time.monotonic() - begun < 50


TALE = """
set -euo pipefail
usage() {{ :; }}
source {launch}/lib.sh
prepare_runtime
start worker bash -c 'trap "sleep 1; echo finished >&2; exit" TERM; echo begun >&2; while :; do sleep 0.1; done'
ready=yes
{then}
"""


def told(directory: Path, then: str, **streams: Any) -> subprocess.Popen[str]:
    """A script whose worker takes a second to end, and says on standard error when it has."""
    (directory / "tmp").mkdir()
    script = directory / "script.sh"
    script.write_text(TALE.format(launch=REPOSITORY / "launch", then=then))
    environ = os.environ | {"TMPDIR": str(directory / "tmp")}
    return subprocess.Popen(["bash", str(script)], env=environ, stderr=subprocess.PIPE, text=True, **streams)


def ended(script: subprocess.Popen[str], directory: Path) -> tuple[int, str]:
    """Status and standard error of a script that has been told to end."""
    _, said = script.communicate(timeout=60)
    assert not list((directory / "tmp").iterdir())
    return script.returncode, said


def test_its_reader_may_end_first(tmp_path: Path) -> None:
    """As ``tee`` does at the same Ctrl-C: the worker finishes its requests all the same."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout:
        script = told(tmp_path, "watch", stdout=stdout)
    assert script.stderr is not None
    assert script.stderr.readline() == "begun\n"
    os.close(reader)
    script.terminate()
    status, said = ended(script, tmp_path)
    assert "finished" in said
    assert status == 0


def test_a_full_disk_under_its_log_ends_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        script = told(tmp_path, 'say "still here"; echo on >&2; watch', stdout=full)
    assert script.stderr is not None
    lines: list[str] = []
    while not {"begun\n", "on\n"} <= set(lines):
        lines.append(script.stderr.readline())
        assert lines[-1], "it has ended"
    script.terminate()
    status, said = ended(script, tmp_path)
    assert "finished" in said
    assert status == 0


CLOCK_IS_SET = """
sleep() { SECONDS=$((SECONDS + 7200)); command sleep "$@"; }
"""
"""In bash that is what setting the machine's clock does to a script, which has no other clock."""


def test_a_clock_that_is_set_kills_no_worker(tmp_path: Path) -> None:
    script = told(tmp_path, f"{CLOCK_IS_SET}\nwatch", stdout=subprocess.PIPE)
    assert script.stderr is not None
    assert script.stderr.readline() == "begun\n"
    script.terminate()
    status, said = ended(script, tmp_path)
    assert "finished" in said
    assert status == 0


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
