"""Processes that are started in surroundings of which nothing is sure: without standard streams,
with Python's own optimisation, or with a log whose disk is full.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import Source

from worker import standard_error
from worker.tiny_model import write_tiny_model

STREAMS = """
import os, pathlib, socket, sys
from worker.importing import prepare
prepare({}, uses_torch=False)
own = socket.socket()
found = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
pathlib.Path(sys.argv[1]).write_text(" ".join(found))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_no_connection_takes_the_place_of_a_stream(closed: str, tmp_path: Path) -> None:
    """What a library prints would go to a client, or into a file that is being written."""
    command = ["bash", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", STREAMS, str(tmp_path / "found")]
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL, capture_output=True)
    found = (tmp_path / "found").read_text().split()
    assert len(found) == 3
    assert not [each for each in found if each.startswith("socket:")]
    assert found[2] == "/dev/null" or "2>&-" not in closed


COMMANDS = ("adapters", "worker", "worker.frontdoor", "worker.models", "worker.tiny_model")


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_need_no_docstrings(module: str) -> None:
    """``PYTHONOPTIMIZE=2`` takes them away, and asserts with them."""
    command = [sys.executable, "-OO", "-m", module, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: ")


def test_progress_needs_no_disk(tmp_path: Path) -> None:
    """A log that is full ends no conversion, which says how far it is."""
    file = Source(write_tiny_model(tmp_path / "tiny")).write(tmp_path / "model.gguf")
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "worker.models", str(file), "--cache", str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=100,
            check=False,
        )
    assert ended.returncode == 0
    assert (Path(ended.stdout.strip()) / "model.safetensors").is_file()


def test_configuration_is_refused_on_a_full_disk() -> None:
    """The status says what the line cannot."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "worker.frontdoor"]
        assert subprocess.run(command, stderr=full, timeout=100, check=False).returncode == 2


def test_a_line_needs_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    standard_error.say("a line")
