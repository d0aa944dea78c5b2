"""The start of vLLM, which a signal ends, and what a killed worker leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_vllm import FakeLlm, package

from worker.engines import StopsLoading
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.owned_directory import OwnedDirectory, remove_abandoned
from worker.errors import StartupError

FOLDER = Path(__file__).resolve().parents[3] / "worker" / "engines" / "vllm"
OWNER = (
    "import time; from owned_directory import OwnedDirectory; "
    "print(OwnedDirectory('dlw-vllm-').path, flush=True); time.sleep(600)"
)
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Loads(FakeLlm):
    """A library that loads for ever, in processes of its own."""

    loading = threading.Event()

    @classmethod
    def from_engine_args(cls, arguments: Any, stat_loggers: list[Any]) -> FakeLlm:
        multiprocessing.get_context("spawn").Process(target=subprocess.call, args=(SLEEP,)).start()
        cls.loading.set()
        time.sleep(600)
        raise AssertionError("too late")


def below() -> list[psutil.Process]:
    """The sleeping process, and the one that has started it."""
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            process = psutil.Process(child.pid)
            found += [process, *process.children()]
    return found


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_load_ends_with_its_processes(is_cancelled: bool) -> None:
    """By a signal, or as the runtime cancels the start; other children live on."""
    other = subprocess.Popen(SLEEP)
    Loads.loading.clear()
    engine = VllmEngine(VllmConfig(model_path="fake"), lambda: replace(package(), async_llm=Loads))
    assert isinstance(engine, StopsLoading)
    start = asyncio.ensure_future(engine.start())
    await asyncio.to_thread(Loads.loading.wait)
    while len(processes := below()) < 2:
        await asyncio.sleep(0.05)
    if is_cancelled:
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    else:
        engine.stop_loading()
        with pytest.raises(StartupError, match="told to stop while vLLM was loading"):
            await start
    await engine.stop()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 10)
    assert alive == []
    assert other.poll() is None
    other.kill()
    other.wait()


def test_directories_of_killed_workers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dlw-vllm-of-another").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER]
    workers = [subprocess.Popen(command, cwd=FOLDER, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [Path(worker.stdout.readline().strip()) for worker in workers if worker.stdout is not None]
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in paths)
    workers[0].send_signal(signal.SIGKILL)
    workers[0].wait()
    made = OwnedDirectory("dlw-vllm-")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "dlw-vllm-of-another", made.path, paths[1]])
    remove_abandoned(tmp_path, "dlw-vllm-")
    assert made.path.exists()
    made.close()
    made.close()
    assert not made.path.exists()
    for worker in workers:
        worker.kill()
        worker.communicate()
