"""Benchmarks end what they have started, however they end themselves, and say what they do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from document_pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import doors
import registrations
import serve

BENCHMARKS = ROOT / "benchmarks"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
STARTS = """
import asyncio, subprocess, sys
sys.path.append(sys.argv[1])
import serve, uvloop
serve.end_on_sigterm()
started = subprocess.Popen(["sleep", "60"])
try:
    print(started.pid, flush=True)
    uvloop.run(asyncio.sleep(60)) if sys.argv[2] == "loop" else started.wait()
finally:
    serve.end([started])
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[Any]]]:
    """The processes that are started in the test."""
    found: list[subprocess.Popen[Any]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield found
    for process in found:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_a_process_that_does_not_end_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        serve.end([deaf], 0.2)
        assert deaf.returncode == -signal.SIGKILL


@pytest.mark.parametrize("waits", ["loop", "process"])
def test_sigterm_ends_what_was_started(waits: str) -> None:
    command = [sys.executable, "-c", STARTS, str(BENCHMARKS), waits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        time.sleep(0.3)
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(20) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()


def test_no_door_stays_where_one_does_not_start(
    started: list[subprocess.Popen[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([70_000, serve._free_port()])  # the first is none
    monkeypatch.setattr(doors, "_free_port", lambda: next(ports))
    with pytest.raises(SystemExit, match="a front door did not start"), doors.running(2):
        pass
    assert len(started) == 3
    assert all(process.poll() is not None for process in started)


def test_no_frontend_stays_where_no_instance_starts(
    started: list[subprocess.Popen[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ncase "$1" in *registrants.py) exit 1 ;; esac\nexec sleep 60\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(registrations, "_served_models", lambda port: set())
    with pytest.raises(AssertionError), registrations.running(tmp_path, registrations.FILE, 1):
        pass
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_every_benchmark_has_a_help() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("*.py")}
    run = [name for name, text in texts.items() if re.search(rf"python benchmarks/{name}", text)]
    assert len(run) > 30
    assert [name for name in run if "ArgumentParser" not in texts[name]] == []
