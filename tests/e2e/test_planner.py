"""Dynamo's own planner, in advisory mode, before workers of ours: it recommends more of them under
load and fewer without, by the forward-pass metrics that they publish.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_stack import Process, Stack, asking, wait_for
from ports import free_port
from servers import EtcdServer

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

REQUIREMENTS = Path(__file__).with_name("planner_requirements.txt")
INTERVAL_S = 3
CONFIG = {
    "environment": "virtual",
    "backend": "vllm",
    "mode": "agg",
    "advisory": True,
    "model_name": "tiny",
    "max_gpu_budget": 8,
    "enable_throughput_scaling": False,
    "enable_load_scaling": True,
    "load_adjustment_interval_seconds": INTERVAL_S,
    "optimization_target": "load",
    "prefill_scale_up_queue_tokens": 100,
    "prefill_scale_down_queue_tokens": 1,
    "decode_scale_up_kv_rate": 5,
    "decode_scale_down_kv_rate": 1,
    "decode_engine_num_gpu": 1,
}


@pytest.fixture(scope="session")
def packages() -> Path:
    """Packages that the planner needs beside Dynamo, kept from one run to the next."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynamo-logits-worker" / "planner"
    directory = cache / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    if not (directory / "whole").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(directory), "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True, capture_output=True)
        (directory / "whole").touch()
    return directory


@pytest.fixture
def planner(stack: Stack, packages: Path, tmp_path: Path) -> Iterator[Process]:
    """The planner, which keeps its decisions in etcd, with two workers of four rows each."""
    (tmp_path / "etcd").mkdir()
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    stack.start_frontend()
    for _ in range(2):
        stack.start_worker("--publish-forward-pass-metrics", "true", "--max-num-seqs", "4", "--kv-blocks", "256")
    ports = {"live_dashboard_port": free_port(), "control_api_port": free_port()}
    environ = {
        **stack.environ,
        "ETCD_ENDPOINTS": etcd.url,
        "PYTHONPATH": f"{stack.environ['PYTHONPATH']}:{packages}",
    }
    command = [sys.executable, "-m", "dynamo.planner", "--config", json.dumps({**CONFIG, **ports})]
    process = Process(command, environ, stack.directory / "planner.log", warm=False)
    stack.keep(process)
    yield process
    etcd.kill()


def recommended(planner: Process) -> list[int]:
    """Numbers of workers that it has recommended; of a decision to change nothing there is none."""
    assert planner.running, planner.log[-4000:]
    return [int(found) for found in re.findall(r"recommended: prefill=- decode=(\d+)", planner.log)]


def test_it_recommends_as_many_workers_as_the_load_needs(stack: Stack, planner: Process) -> None:
    def ask() -> None:
        status, text = stack.post("completions", prompt=[5] * 40, max_tokens=400, ignore_eos=True)
        assert status == 200, text

    with asking(20, ask):
        wait_for(lambda: 3 in recommended(planner), "a third worker", 120)
    num_before = len(recommended(planner))
    wait_for(lambda: 1 in recommended(planner)[num_before:], "one worker less", 120)
