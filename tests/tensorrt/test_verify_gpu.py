"""``scripts/verify-gpu`` on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest
from stand_in import STAND_IN

from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.engines.trtllm.engine import TrtllmEngine
from worker.engines.trtllm.verify import Checklist
from worker.errors import RequestFailed

pytestmark = pytest.mark.timeout(280)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "verify-gpu"


def verify(model: Path, report: Path, *argv: str, **switches: object) -> subprocess.CompletedProcess[str]:
    variables = {
        "MODEL_PATH": str(model),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(STAND_IN),
        "REPORT": str(report),
        "TRTLLM_STANDIN": json.dumps(switches),
    }
    return subprocess.run(
        [str(SCRIPT), "--max-batch-size", "16", *argv],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.campaign
def test_it_ends_although_the_executor_is_dead(model: Path, tmp_path: Path) -> None:
    """Its process ended during the first check, and its shutdown blocks whoever calls it."""
    done = verify(model, tmp_path / "report.md", dies_on_prompt=True, shutdown_blocks_s=600)
    assert done.returncode == 1, done.stderr
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if "| FAIL |" in line]
    assert len(rows) == 13
    assert done.stdout.endswith(f"verify-gpu: the report is in {tmp_path}/report.md\n")


def test_without_a_model_it_needs_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MODEL_PATH"}
    environment |= {"PYTHON": sys.executable, "REPORT": str(tmp_path / "report.md"), "CUDA_VISIBLE_DEVICES": ""}
    for arguments, message in (
        ([], "torch sees no CUDA device, and MODEL_PATH is not set"),
        (["--max-batch-size", "16"], "--max-batch-size: without MODEL_PATH it takes no arguments"),
    ):
        done = subprocess.run(
            [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert (done.returncode, done.stderr) == (2, f"verify-gpu: error: {message}\n")
    assert not (tmp_path / "report.md").exists()


INTERPRETER = """#!/usr/bin/env bash
case $* in
    *get_device_name*) echo "A GPU" ;;
    *__version__*) echo "| versions | of all |" ;;
    *engines/cuda*) echo "1 failed, 2 passed"; exit 1 ;;
    *benchmarks/gpu.py) {speed} ;;
    *) echo "all is well" ;;
esac
"""


def with_interpreter(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """``verify-gpu`` without a model, whose interpreter answers as on a machine with a GPU."""
    interpreter = directory / "python"
    interpreter.write_text(script)
    interpreter.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "MODEL_PATH"}
    environment |= {"PYTHON": str(interpreter), "REPORT": str(directory / "report.md")}
    return subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_without_triton_there_is_nothing_to_check(tmp_path: Path) -> None:
    done = with_interpreter(INTERPRETER.replace('echo "| versions | of all |"', "exit 1"), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "verify-gpu: error: without Triton there are no kernels to check\n"
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize("is_measured", [True, False])
def test_the_report_names_what_failed(is_measured: bool, tmp_path: Path) -> None:
    done = with_interpreter(INTERPRETER.replace("{speed}", "echo fast" if is_measured else "exit 1"), tmp_path)
    assert done.returncode == 1, done.stderr
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[:7] == [
        "# The embedded engine on A GPU",
        "",
        "| check | result |",
        "|---|---|",
        "| versions | of all |",
        "| kernels, exact numerics, KV transfer | FAIL: 1 failed, 2 passed |",
        "| tokens are transformers' | pass: all is well |",
    ]
    assert "| golden matrix | pass: all is well |" in lines
    assert ("| speed | pass: fast |" if is_measured else "| speed | FAIL:  |") in lines
    assert any(line.startswith("| rows | floor, ms |") for line in lines) is is_measured
    assert done.stdout.endswith(f"verify-gpu: the report is in {tmp_path}/report.md\n")


class Failing:
    """An engine whose answers end with an error."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(token_ids=[7], finish_reason="error", error="a fault")


async def test_an_answer_that_fails_is_no_answer() -> None:
    """Also where Python runs without asserts (``PYTHONOPTIMIZE``)."""
    engine, info = cast(TrtllmEngine, Failing()), cast(EngineInfo, None)
    with pytest.raises(RequestFailed, match="a fault"):
        await Checklist(engine, info)._tokens()
