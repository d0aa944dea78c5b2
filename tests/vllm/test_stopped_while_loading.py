"""A worker that is told to stop, or killed, while vLLM loads."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from e2e_stack import Worker, running_stack, wait_for
from vllm_stack import OPTIONS, START_S, default_model

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

END_S = 20.0
"""Time for the worker to end, seconds: launch scripts and Kubernetes kill it after more."""


def engine_of(worker: Worker) -> list[psutil.Process]:
    """vLLM's processes, once there are both of them."""
    found = psutil.Process(worker.child.pid).children(recursive=True)
    return [each for each in found if "VLLM" in each.name()] if len(found) > 1 else []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 1), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_worker_leaves_nothing_of_vllm(tmp_path: Path, number: int, status: int) -> None:
    with running_stack(tmp_path / "stack", default_model()) as stack:
        stack.start_frontend()
        stack.environ = {**stack.environ, "TMPDIR": str(tmp_path)}
        worker = stack.start_worker(*OPTIONS, wait=False)
        engine = wait_for(lambda: engine_of(worker) or not worker.running, "vLLM's processes", START_S)
        assert worker.running, worker.log
        began = time.monotonic()
        worker.signal(number)
        assert worker.wait(END_S) == status
        assert psutil.wait_procs(engine, timeout=END_S)[1] == []
        if number == signal.SIGTERM:
            assert time.monotonic() - began < END_S
            assert "worker: error: the worker was told to stop while vLLM was loading" in worker.log
            assert not list(tmp_path.glob("*dlw-vllm-*"))
